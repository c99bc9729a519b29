"""The programs of `tools/` that people run by name, each once.

`tests/lab/` has what they measure and write.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.engines import LLAMA
from tests.support.random_checkpoints import random_checkpoint
from tools import bench_kernels, bench_step, compare_engines, gpu_slot, inspect_kernels
from tools.lab.kernel_lab.inspection import kernel_tables
from tools.lab.paper.main import main as draw_figures
from tools.lab.peers import other_programs
from tools.lab.peers.report import BEGIN, END
from tools.lab.peers.task import Answer, Task
from tools.reproduce_paper import measure_attention

TOOLS = Path(__file__).parents[1] / "tools"
NAMED = [
    "bench_kernels",
    "bench_step",
    "bench_throughput",
    "compare_engines",
    "fuzz_engine",
    "gpu_slot",
    "inspect_kernels",
    "make_random_model",
    "reproduce_paper",
    "serve",
    "train_demo_model",
]
PROGRAMS = sorted(path.stem for path in TOOLS.glob("*.py") if "__main__" in path.read_text())


def run_program(name: str, *words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    runpy.run_path(str(TOOLS / f"{name}.py"), run_name="__main__")


def check_usage(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asserts that a program prints how it is used."""
    with pytest.raises(SystemExit) as exit_info:
        run_program(name, "--help", monkeypatch=monkeypatch)
    assert exit_info.value.code == 0 and "usage: " in capsys.readouterr().out


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_says_how_it_is_used(name, monkeypatch, capsys):
    assert {*NAMED} <= {*PROGRAMS}
    if name == "make_random_model":
        pytest.importorskip("torch")
    check_usage(name, monkeypatch, capsys)


def test_a_random_model_is_written(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch", reason="transformers makes the model on torch")
    run_program("make_random_model", "llama-15m", str(tmp_path), monkeypatch=monkeypatch)
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 288
    assert capsys.readouterr().out.startswith("llama-15m: ")


def test_a_step_is_timed_with_its_parts(capsys):
    words = ["--models", "tiny", "--rows", "2", "--contexts", "32", "--round", "0.001"]
    assert bench_step.main(words) == 0
    [row] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    parts = ("step", "read", "call", "matmuls", "attention", "sampler", "bytes_read")
    assert row["rows"] == 2 and all(row[part] > 0 for part in parts)


def test_a_table_of_the_paper_is_made(tmp_path):
    words = ["--quick", "--figures", "table1", "--out", str(tmp_path), "--processes", "1"]
    assert draw_figures(words, measure_attention=measure_attention) == 0
    assert "OPT-13B" in (tmp_path / "paper.md").read_text()


def test_what_a_minute_on_a_gpu_runs(tmp_path, capsys):
    words = ["--list", "--state", str(tmp_path / "state"), "--out", str(tmp_path / "out")]
    assert gpu_slot.main(words) == 0
    names = [line[:22].strip() for line in capsys.readouterr().out.splitlines()]
    assert {"parity triton", "steps", "contiguous", "engine", "tune"} <= {*names}


@pytest.mark.parametrize(
    "name",
    [
        "lab/bench_engine",
        "bench_step",
        "lab/check_engine",
        "inspect_kernels",
        "lab/time_contiguous_attention",
        "gpu_slot",
    ],
)
def test_a_program_finds_its_modules_where_jaxpage_is_not_installed(name, monkeypatch):
    monkeypatch.setattr(
        sys, "path", [path for path in sys.path if Path(path or ".").resolve() != TOOLS.parent]
    )
    runpy.run_path(str(TOOLS / f"{name}.py"), run_name="imported")
    assert str(TOOLS.parent) in sys.path


def test_a_table_is_written_checked_and_found_old(tmp_path, monkeypatch, capsys):
    rows = [kernel_tables.Row("attend (triton)", "decode", 116, 0, 39117, (0, 32, 32, 0))]
    monkeypatch.setattr(inspect_kernels, "unavailable", lambda: None)
    monkeypatch.setattr(inspect_kernels.sass, "disassembler", lambda: "nvdisasm")
    monkeypatch.setattr(
        inspect_kernels, "kernel_rows", lambda *_: (rows, ["attend mosaic, int8: reads what lies"])
    )
    monkeypatch.setattr(
        inspect_kernels,
        "step_rows",
        lambda *_: iter([("decode", "2 attend", "9", "1", "1", "3", "0", "none")]),
    )
    path = tmp_path / "kernels.md"
    words = ["--document", str(path), "--quiet"]
    inspect_kernels.main(words)
    assert "| attend (triton) | decode | 116 | 0 | 38.2 | 0 | 32 | 32 | 0 |" in path.read_text()
    inspect_kernels.main([*words, "--check"])
    rows[0] = kernel_tables.Row("attend (triton)", "decode", 255, 24, None, None)
    with pytest.raises(SystemExit) as stopped:
        inspect_kernels.main([*words, "--check"])
    assert (
        stopped.value.code == 1
        and "+| attend (triton) | decode | 255 | 24 | ? | ? |" in capsys.readouterr().out
    )
    assert "| 116 |" in path.read_text()


@pytest.mark.parametrize(("others", "busy"), [(20, False), (80, True)])
def test_nothing_is_written_on_a_busy_machine(others, busy, tmp_path, monkeypatch, capsys):
    """Other programs have 0.2 and 0.8 seconds of two cores in five; the engine's 4 do not count."""
    children = argparse.Namespace(ru_utime=1.0, ru_stime=0.0)
    stat, clock, written = tmp_path / "stat", iter([10.0, 15.0]), tmp_path / "results.md"
    written.write_text(f"{BEGIN}\n{END}\n")
    model = random_checkpoint(tmp_path / "llama", {**LLAMA, "max_position_embeddings": 64})

    def run(name: str, task: Task, python: str) -> Answer:
        stat.write_text(f"cpu  {500 + others} 0 0 9999 9999 0 0 0 0 0\n")
        children.ru_utime += 4.0
        assert task.prompt == 60
        outputs = [[7] * length for _, length in task.trace]
        return Answer("1", outputs, dict.fromkeys(task.numbers, 1.0))

    stat.write_text("cpu  100 0 0 0 0 0 0 0 0 0\n")
    monkeypatch.setattr(other_programs, "STAT", stat)
    monkeypatch.setattr(other_programs.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(other_programs.os, "cpu_count", lambda: 2)
    usage = argparse.Namespace(ru_utime=0.0, ru_stime=0.0)
    uses = {
        other_programs.resource.RUSAGE_SELF: usage,
        other_programs.resource.RUSAGE_CHILDREN: children,
    }
    monkeypatch.setattr(other_programs.resource, "getrusage", uses.__getitem__)
    monkeypatch.setattr(compare_engines, "_run", run)
    words = ["--engines", "jaxpage", "--batches", "1", "--repeats", "1", "--write", str(written)]
    monkeypatch.setattr(sys, "argv", ["compare_engines.py", str(model), *words])
    if busy:
        with pytest.raises(SystemExit, match="nothing is written: stop the other programs"):
            compare_engines.main()
        assert "more than 5% of the cores during jaxpage 8%" in capsys.readouterr().err
    else:
        compare_engines.main()
    assert ("| jaxpage |" in written.read_text()) is not busy


def test_kernels_are_timed(tmp_path, capsys):
    out, name = tmp_path / "bench.md", "llama-3-8b decode 4x2048"
    command = [
        "--small",
        "--interpret",
        "--specs",
        name,
        "--backends",
        "scan,reference",
        "--out",
        str(out),
    ]
    assert bench_kernels.main(command) == 0
    data = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["backend"] for row in data["rows"]] == ["scan", "reference"]
    assert all(row["seconds"] > 0 and row["bytes_per_second"] > 0 for row in data["rows"])
    assert f"| {name} | scan |" in out.read_text()
