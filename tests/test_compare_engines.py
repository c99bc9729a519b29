"""`tools/compare_engines.py`: its report by hand, what is left out and why; in the sweep, two engines for real."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.engines import LLAMA
from tests.support.random_checkpoints import random_checkpoint
from tools import compare_engines
from tools.compare_engines import BEGIN, END, replaced, report
from tools.peers.task import Answer, Task

TRACE = [([1, 2, 3], 2), ([4], 4)]
SIZES = argparse.Namespace(batches=[1, 8], context=20, steps=4, python=[])


def test_a_report_by_hand() -> None:
    answers = {
        "jaxpage": Answer("jax 1", 2.0, [[5, 6], [7, 8, 9, 9]], {1: 0.0123, 8: 0.02}),
        "other": Answer("other 3", 4.0, [[5, 6], [7, 8, 9, 1]], {1: 0.5, 8: 1.0}),
    }
    head, table = report(answers, "tiny", TRACE, SIZES).split("\n\n")
    sizes = "--num-prompts 2 --batches 1 8 --context 20 --steps 4"
    assert f"`python tools/compare_engines.py models/tiny --engines jaxpage other {sizes}`" in head
    assert (
        "tiny: 2 requests with lengths of `sharegpt`, 4 tokens in, 6 out" in head
        and "context of 20 to 24." in head
    )
    assert table.splitlines()[2:] == [
        "| jaxpage | 3.0 | 1.00 | 2 of 2 | 12.3 | 20.0 | jax 1 |",
        "| other | 1.5 | 0.50 | 1 of 2 | 500.0 | 1000.0 | other 3 |",
    ]


def test_the_command_over_the_table_makes_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read by a shell's rules and by the tool itself."""
    names = ["jaxpage int4", "llama.cpp int4 (Q4_1)"]
    answers = {name: Answer("1", 2.0, [[5, 6], [7, 8, 9, 9]], {1: 0.1, 8: 0.2}) for name in names}
    asked = argparse.Namespace(**{**vars(SIZES), "python": [("jaxpage", sys.executable)]})
    command = report(answers, "tiny", TRACE, asked).split("`")[1]
    _, *words = shlex.split(command)
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert sys.executable not in command
    found = compare_engines._arguments()
    assert (found.model, found.engines, found.python) == (
        "models/tiny",
        names,
        [("jaxpage", sys.executable)],
    )
    assert (found.num_prompts, found.batches, found.context, found.steps) == (2, [1, 8], 20, 4)
    everything = report(
        dict.fromkeys(compare_engines.CASES, answers[names[0]]), "tiny", TRACE, SIZES
    )
    assert "--engines" not in everything


def test_its_section_of_a_file_is_replaced() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert (
        replaced(text, "new")
        == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
        == replaced(replaced(text, "x"), "new")
    )
    with pytest.raises(SystemExit, match="no section between"):
        replaced("before", "new")


@pytest.mark.parametrize(
    ("name", "module", "packages"),
    [
        ("CTranslate2 int8", "ctranslate2", "ctranslate2"),
        ("llama.cpp", "llama_cpp", "llama-cpp-python gguf"),
    ],
)
def test_an_engine_without_its_packages_is_left_out(
    name: str, module: str, packages: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec(module) is not None:
        pytest.skip("it is installed")
    task = Task(str(tmp_path), "float32", TRACE, [1], 20, 4, 1)
    assert compare_engines._run(name, task, sys.executable) is None
    said = capsys.readouterr().err
    assert f"{name} is left out: No module named '{module}'. Install its packages: " in said
    assert f"{sys.executable} -m pip install {packages}" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--python", "jaxpage=/no/such"], "'jaxpage=/no/such': there is no such program"),
        (["--python", "vllm=python3"], "'vllm=python3' is not one of"),
        (
            ["--chart", "x.svg"],
            "--chart needs matplotlib, which is not installed: pip install 'jaxpage[plot]'",
        ),
    ],
)
def test_wrong_use_is_told_before_engines_run(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_engines.py", "models/tiny", *words])
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    with pytest.raises(SystemExit) as exit_info:
        compare_engines.main()
    assert exit_info.value.code == 2 and said in capsys.readouterr().err


def test_a_model_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_engines.py", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit, match="nowhere is no model: it has no config.json"):
        compare_engines.main()


@pytest.mark.sweep
def test_two_engines_for_real(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="transformers runs on torch")
    model = random_checkpoint(tmp_path / "llama", {**LLAMA, "max_position_embeddings": 1024})
    path = tmp_path / "benchmarks.md"
    path.write_text(f"{BEGIN}\n{END}\n")
    words = [
        "--engines",
        "jaxpage",
        "transformers",
        "--num-prompts",
        "3",
        "--batches",
        "1",
        "2",
        "--steps",
        "4",
    ]
    monkeypatch.setattr(
        sys, "argv", ["compare_engines.py", str(model), *words, "--write", str(path)]
    )
    compare_engines.main()
    shown = capsys.readouterr().out
    assert json.loads((model / "config.json").read_text())["vocab_size"] == 257
    assert shown.count("| 3 of 3 |") == 2 and shown.strip() in path.read_text()
