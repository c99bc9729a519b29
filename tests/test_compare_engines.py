"""`tools/compare_engines.py`: its report by hand, what is left out and why; in the sweep, two engines for real."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.support.engines import LLAMA
from tests.support.random_checkpoints import random_checkpoint
from tools import compare_engines
from tools.compare_engines import BEGIN, END, replaced, report
from tools.peers.task import Answer, Task

TRACE = [([1, 2, 3], 2), ([4], 4)]
SIZES = argparse.Namespace(batches=[1, 8], context=20, steps=4)


def test_a_report_by_hand() -> None:
    answers = {
        "jaxpage": Answer("jax 1", 2.0, [[5, 6], [7, 8, 9, 9]], {1: 0.0123, 8: 0.02}),
        "other": Answer("other 3", 4.0, [[5, 6], [7, 8, 9, 1]], {1: 0.5, 8: 1.0}),
    }
    head, table = report(answers, "tiny", TRACE, SIZES).split("\n\n")
    assert "`python tools/compare_engines.py models/tiny --num-prompts 2 --batches 1 8 --context 20 --steps 4`" in head
    assert "tiny: 2 requests with lengths of `sharegpt`, 4 tokens in, 6 out" in head and "context of 20 to 24." in head
    assert table.splitlines()[2:] == [
        "| jaxpage | 3.0 | 1.00 | 2 of 2 | 12.3 | 20.0 | jax 1 |",
        "| other | 1.5 | 0.50 | 1 of 2 | 500.0 | 1000.0 | other 3 |",
    ]


def test_its_section_of_a_file_is_replaced() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert replaced(text, "new") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n" == replaced(replaced(text, "x"), "new")
    with pytest.raises(SystemExit, match="no section between"):
        replaced("before", "new")


def test_an_engine_without_its_packages_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("ctranslate2") is not None:
        pytest.skip("it is installed")
    task = Task(str(tmp_path), "float32", TRACE, [1], 20, 4, 1)
    assert compare_engines._run("CTranslate2 int8", task, sys.executable) is None
    assert "CTranslate2 int8 is left out: ModuleNotFoundError: No module named 'ctranslate2'" in capsys.readouterr().err


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
    words = ["--engines", "jaxpage", "transformers", "--num-prompts", "3", "--batches", "1", "2", "--steps", "4"]
    monkeypatch.setattr(sys, "argv", ["compare_engines.py", str(model), *words, "--write", str(path)])
    compare_engines.main()
    shown = capsys.readouterr().out
    assert json.loads((model / "config.json").read_text())["vocab_size"] == 257
    assert shown.count("| 3 of 3 |") == 2 and shown.strip() in path.read_text()
