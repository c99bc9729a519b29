"""`tools/compare_engines.py`: its report by hand, what is left out and why.

In the sweep, two engines for real.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path

import pytest

from tests.support.engines import LLAMA
from tests.support.random_checkpoints import random_checkpoint
from tools import compare_engines
from tools.compare_engines import measure
from tools.lab.peers import task as task_module
from tools.lab.peers.cases import CASES
from tools.lab.peers.report import BEGIN, END, Best, best, replace_section, report
from tools.lab.peers.task import Answer, Task, answer

TRACE = [([1, 2, 3], 2), ([4], 4)]
SIZES = argparse.Namespace(batches=[1, 8], context=20, steps=4, prompt=30, repeats=2, python=[])


def _answer(
    trace: float, single: float, eight: float, prompt: float = 0.5, last: int = 9
) -> Answer:
    outputs = [[5, 6], [7, 8, 9, last]]
    seconds = {"trace": trace, "1 row": single, "8 rows": eight, "prompt": prompt}
    return Answer("engine 1", outputs, seconds)


def test_a_report_by_hand() -> None:
    answers = {
        "jaxpage": {"": [_answer(2.0, 0.0123, 0.02), _answer(3.0, 0.0125, 0.03)]},
        "llama.cpp": {
            "u": [_answer(4.0, 0.5, 1.0), _answer(4.0, 0.5, 1.0)],
            "sf": [_answer(5.0, 0.25, 2.0, 0.1, last=1), _answer(6.0, 0.25, 2.0, 0.1)],
        },
        "vLLM": {"c": [_answer(4.0, inf, 0.5, inf), _answer(4.0, 0.5, inf, inf)]},
    }
    head, table = report(answers, "tiny", TRACE, SIZES).split("\n\n")
    sizes = "--num-prompts 2 --batches 1 8 --context 20 --steps 4 --prompt 30 --repeats 2"
    assert (
        f"`python tools/compare_engines.py models/tiny --engines jaxpage llama.cpp vLLM {sizes}`"
        in head
    )
    assert "requests (2) with lengths of `sharegpt`, 4 tokens in,\n6 out" in head
    assert "20 to 24, and of a prompt of 30 tokens" in head
    assert "Best mode of each number: llama.cpp with unified (u)" in head
    assert table.splitlines()[2:] == [
        "| jaxpage | 2 (2 to 3) | 1.00 | 2 of 2 | 12.4 (12.3 to 12.5) | 25.0 (20.0 to 30.0) "
        "| 500.0 (500.0 to 500.0) | engine 1 |",
        "| llama.cpp | 2 (2 to 2) u | 0.62 | 2 of 2 | 250.0 (250.0 to 250.0) sf "
        "| 1000.0 (1000.0 to 1000.0) u | 100.0 (100.0 to 100.0) sf | engine 1 |",
        "| vLLM | 2 (2 to 2) c | 0.62 | 2 of 2 | 500.0 (500.0 to 500.0) c "
        "| 500.0 (500.0 to 500.0) c | not measured | engine 1 |",
    ]


def test_a_difference_that_pauses_swallowed_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shorter of two runs takes longer here, so a step would take less than no time."""
    monkeypatch.setattr(task_module, "_fastest", lambda generate, prompts, lengths: [2.0, 1.5])
    task = Task("model", "float32", TRACE, [8], 20, 4, 30, 1, ["8 rows"])
    answer(task, "engine 1", lambda prompts, lengths: [[1] * length for length in lengths])
    assert Answer(**json.loads(capsys.readouterr().out)).seconds == {"8 rows": inf}


def test_later_rounds_measure_what_a_mode_was_best_in() -> None:
    """Each engine runs once a round, and a mode that fails is left out."""
    seconds = {"u": (1.0, 3.0, 2.0), "s": (2.0, 2.0, 2.0), "sf": (2.0, 3.0, 1.0)}
    numbers = ["trace", "1 row", "8 rows", "prompt"]
    runs = []

    def run(name: str, letters: str, expected: Sequence[str]) -> Answer | None:
        runs.append((name, letters, *expected))
        if name == "jaxpage":
            return _answer(1.0, 1.0, 1.0)
        if letters not in seconds:
            return None
        answer = _answer(*seconds[letters], prompt=9.0)
        later = len(runs) > 5
        answer.seconds = {each: answer.seconds[each] * (1 + later) for each in expected}
        return answer

    answers = measure(["jaxpage", "llama.cpp"], numbers, 2, run)
    modes = [("jaxpage", ""), *(("llama.cpp", letters) for letters in ("u", "uf", "s", "sf"))]
    assert runs == [
        *((*mode, *numbers) for mode in modes),
        ("jaxpage", "", *numbers),
        ("llama.cpp", "u", "trace", "prompt"),
        ("llama.cpp", "s", "1 row"),
        ("llama.cpp", "sf", "8 rows"),
    ]
    assert best(answers["llama.cpp"], "8 rows") == Best(1.5, 1.0, 2.0, "sf")
    assert measure(["vLLM"], numbers, 2, lambda name, letters, expected: None) == {}


def test_the_command_over_the_table_makes_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read by a shell's rules and by the tool itself."""
    names = ["jaxpage int4", "llama.cpp int4 (Q4_1)"]
    answers = {name: {"": [_answer(2.0, 0.1, 0.2)]} for name in names}
    requested = argparse.Namespace(**{**vars(SIZES), "python": [("jaxpage", sys.executable)]})
    command = report(answers, "tiny", TRACE, requested).split("`")[1]
    _, *words = shlex.split(command)
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert sys.executable not in command
    arguments = compare_engines._arguments()
    assert (arguments.model, arguments.engines, arguments.python) == (
        "models/tiny",
        names,
        [("jaxpage", sys.executable)],
    )
    assert (arguments.num_prompts, arguments.batches, arguments.context, arguments.steps) == (
        2,
        [1, 8],
        20,
        4,
    )
    assert (arguments.prompt, arguments.repeats) == (30, 2)
    everything = report(dict.fromkeys(CASES, answers[names[0]]), "tiny", TRACE, SIZES)
    assert "--engines" not in everything


def test_its_section_of_a_file_is_replaced() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert (
        replace_section(text, "new")
        == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
        == replace_section(replace_section(text, "x"), "new")
    )
    with pytest.raises(SystemExit, match="no section between"):
        replace_section("before", "new")


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
    task = Task(str(tmp_path), "float32", TRACE, [1], 20, 4, 30, 1, ["trace"])
    assert compare_engines._run(name, task, sys.executable) is None
    said = capsys.readouterr().err
    assert f"{name} is left out: No module named '{module}'. Install its packages: " in said
    assert f"{sys.executable} -m pip install {packages}" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--python", "jaxpage=/no/such"], "'jaxpage=/no/such': there is no such program"),
        (["--python", "ollama=python3"], "'ollama=python3' is not one of"),
        (
            ["--chart", "x.svg"],
            "--chart needs matplotlib, which is not installed: pip install 'jaxpage[plot]'",
        ),
    ],
)
def test_wrong_use_is_reported_before_engines_run(
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
        "--prompt",
        "64",
        "--repeats",
        "1",
    ]
    monkeypatch.setattr(
        sys, "argv", ["compare_engines.py", str(model), *words, "--write", str(path)]
    )
    monkeypatch.setattr(compare_engines, "BUSY", 1.0)
    compare_engines.main()
    shown = capsys.readouterr().out
    assert json.loads((model / "config.json").read_text())["vocab_size"] == 257
    assert shown.count("| 3 of 3 |") == 2 and shown.strip() in path.read_text()
