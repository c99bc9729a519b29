"""Says what `tools/lab/bench_scheduler.py` measures and prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpage.scheduling import Preemption
from jaxpage.simulation.setup import Setup
from tools.lab import bench_scheduler
from tools.lab.scheduler_lab.host_time import WaitingTime, minimum
from tools.lab.scheduler_lab.saturation import saturate


def test_the_literal_reading_of_the_rule_leaves_a_third_of_the_pool_empty() -> None:
    """New requests wait until the preempted ones are completed: a simulator that shares no code had
    67 % and 25.5 requests.
    """
    setup = Setup(preemption=Preemption("recompute", "completed"))
    mean = (
        saturate(setup.new_scheduler, "sharegpt", rate=2.0, seconds=800.0, seeds=[0]).runs[0].mean
    )
    assert 1 - mean.pool_waste == pytest.approx(0.67, abs=0.05)
    assert mean.running == pytest.approx(25.5, rel=0.1)


def test_of_repeated_measurements_the_least_counts() -> None:
    rounds = [[WaitingTime(10, 64, 3.0, 2.0, 9.0, 5.0)], [WaitingTime(10, 64, 4.0, 1.0, 8.0, 6.0)]]
    assert minimum(rounds) == [WaitingTime(10, 64, 3.0, 1.0, 8.0, 5.0)]


def test_the_benchmark_prints_tables_and_one_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_scheduler, "NUMS_WAITING", (2, 5))
    monkeypatch.setattr(bench_scheduler, "NUMS_RUNNING", (4,))
    monkeypatch.setattr(bench_scheduler, "PRESSED", 16)
    monkeypatch.setattr(bench_scheduler, "ROUNDS", 1)
    assert (
        bench_scheduler.main(["--seconds", "20", "--rates", "1", "4", "--seeds", "2", "--json"])
        == 0
    )
    *shown, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert [rate["request_rate"] for rate in result["waste"]["rates"]] == [1, 4]
    for rate in result["waste"]["rates"]:
        shares = [rate[f"{kind}_share"] for kind in ("token", "reserved", "internal", "free")]
        assert [sum(kinds) for kinds in zip(*shares, strict=True)] == pytest.approx([1.0, 1.0])
        assert rate["pool_waste"] == pytest.approx([1 - tokens for tokens in rate["token_share"]])
    assert [(item["num_running"], item["prefix_caching"]) for item in result["planning"]] == [
        (4, False),
        (4, True),
    ]
    assert [item["completed"] for item in result["pressure"]] == [16] * 4
    assert [item["num_waiting"] for item in result["waiting"]] == [2, 5]
    times = [
        item[name]
        for item in result["waiting"]
        for name in ("plan_us", "commit_us", "add_us", "abort_us")
    ]
    assert min(times) > 0
    assert result["environment"]["cores"] > 0
    table = "\n".join(shown)
    assert "waste of the pool %" in table and "batch builder µs" in table and "abort µs" in table


def test_one_section_alone_and_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_scheduler.main(["--waste", "--seconds", "10", "--rates", "2", "--seeds", "1"]) == 0
    title, header, row, *others = capsys.readouterr().out.splitlines()
    assert title.startswith("Memory: 983 blocks of 16") and others == [""]
    assert header.split()[0] == "requests/s" and row.split()[0] == "2"
    with pytest.raises(SystemExit):
        bench_scheduler.main(["--rates", "0"])
    assert "--rates and --seconds must be positive" in capsys.readouterr().err


def test_the_tool_is_the_same_program() -> None:
    root = Path(__file__).parents[2]
    command = [
        sys.executable,
        "tools/lab/bench_scheduler.py",
        "--waste",
        "--seconds",
        "5",
        "--seeds",
        "1",
    ]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=root,
        env={"PYTHONPATH": str(root)},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Memory: 983 blocks")
