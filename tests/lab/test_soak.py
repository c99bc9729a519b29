"""A short soak with tools/lab/soak.py, and that it sees each promise that is broken."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.lab.soak import Probe, Tally, judge, promises_broken
from tools.lab.soak_requests import Ask, asks

ROOT = Path(__file__).parents[2]
WARM = Probe(
    resident_bytes=1000 << 20,
    num_files=9,
    num_threads=20,
    metrics={
        "jaxpage_num_requests_running": 0,
        "jaxpage_num_requests_waiting": 0,
        "jaxpage_num_blocks_pinned": 0,
        "jaxpage_num_blocks_free": 24,
        "jaxpage_num_blocks_total": 24,
        "jaxpage_compile_total": 10,
        "jaxpage_num_preemptions_total": 1,
    },
)


def test_a_short_soak_keeps_every_promise() -> None:
    command = [
        sys.executable,
        "-m",
        "tools.lab.soak",
        "--requests",
        "120",
        "--warm-up",
        "50",
        "--clients",
        "16",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("every promise was kept\n"), (
        done.stdout + done.stderr
    )
    assert "requests              120 in" in done.stdout


def test_requests_are_the_same_for_the_same_seed() -> None:
    expected = list(asks(500, 1, 0.2))
    assert expected == list(asks(500, 1, 0.2)) != list(asks(500, 2, 0.2))
    assert len({ask.kind for ask in expected}) > 10
    leaving = [ask for ask in expected if ask.leaves_after is not None]
    assert 50 < len(leaving) < 150 and not any(
        ask.leaves_after is not None for ask in asks(500, 1, 0.0)
    )


def _find(
    end: Probe = WARM,
    *,
    tally: Tally | None = None,
    log: Counter[str] | None = None,
    status: int = 0,
) -> Any:
    return promises_broken(
        [WARM, end], tally or Tally(), SimpleNamespace(errors=log or Counter()), status
    )  # type: ignore[arg-type]


def _with(**metrics: float) -> Probe:
    return replace(
        WARM,
        metrics={**WARM.metrics, **{f"jaxpage_{name}": value for name, value in metrics.items()}},
    )


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (_with(num_blocks_free=23), "blocks are lost"),
        (_with(num_requests_running=1), "num_requests_running is 1"),
        (_with(num_requests_waiting=1), "num_requests_waiting is 1"),
        (_with(num_blocks_pinned=1), "num_blocks_pinned is 1"),
        (_with(compile_total=11), "compiled in service"),
        (_with(num_preemptions_total=0), "no request was preempted"),
        (replace(WARM, resident_bytes=1101 << 20), "memory grew from 1000 to 1101 MiB"),
        (replace(WARM, num_files=12), "files 9 -> 12"),
        (replace(WARM, num_threads=23), "threads 20 -> 23"),
    ],
)
def test_what_is_left_behind_is_seen(end: Probe, message: str) -> None:
    assert _find() == []
    (problem,) = _find(end)
    assert message in problem


def test_wrong_answers_logs_and_statuses_are_seen() -> None:
    assert _find(tally=Tally(errors=Counter({"anchor: another text than before": 2}))) == [
        "2 x anchor: another text than before"
    ]
    assert _find(log=Counter({"error: a step failed": 1})) == [
        "1 x in the server's log: error: a step failed"
    ]
    assert _find(status=1) == ["the server's exit status is 1"]


ANCHOR = Ask("anchor", "/v1/completions", {"prompt": "a"})
STREAM = Ask("streamed", "/v1/completions", {"prompt": "a", "stream": True})


@pytest.mark.parametrize(
    ("ask", "status", "body", "message"),
    [
        (ANCHOR, 500, "{}", "status 500"),
        (ANCHOR, 200, '{"choices": [{"text": "other"}]}', "another text"),
        (STREAM, 200, 'data: {"choices": []}\n\n', "without its end"),
        (STREAM, 200, 'data: {"error": {}}\n\ndata: [DONE]\n\n', "an error in a stream"),
        (Ask("refused", "/", {}, (400,)), 200, "{}", "status 200"),
        (Ask("refused", "/", {}, (400,)), 400, "{}", "another shape"),
    ],
)
def test_wrong_answers_are_reported(ask: Ask, status: int, body: str, message: str) -> None:
    anchors = {"a": "the text"}
    assert message in (judge(ask, status, body, anchors) or "")
    assert judge(ANCHOR, 200, '{"choices": [{"text": "the text"}]}', anchors) is None
