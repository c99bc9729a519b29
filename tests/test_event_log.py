"""Event logs: a run is the same when it is run again, to the last bit; and a change of a log is
found where it was made.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import logging
import os
import runpy
import signal
import stat
import string
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from jaxpage import LLM, BeamSearchParams, SamplingParams, cli
from jaxpage.assembly import Built, Hooks
from jaxpage.checkpoints import load_weights
from jaxpage.checkpoints.finding.resolve import DEMO
from jaxpage.decoding import BeamStrategy, SamplingStrategy
from jaxpage.driver import Driver
from jaxpage.engine import AdmissionRules, EngineParts
from jaxpage.engine.engine import Engine
from jaxpage.engine.strategies import NO_PARTS
from jaxpage.errors import CapacityError, ConfigError, EngineFailed, EventLogError
from jaxpage.outputs import TokenLogprobs
from jaxpage.replay import replaying
from jaxpage.replay.event_log import MAX_LINE_BYTES, EventLog, LogReader
from jaxpage.replay.incidents import IncidentRing, scrub
from jaxpage.replay.log_header import _other_choices, engine_header, read_header, weights_hash
from jaxpage.replay.log_walk import Walk
from jaxpage.replay.recorder import Recorder
from jaxpage.replay.replaying import Replay, Report
from jaxpage.scheduling import POLICIES
from jaxpage.serving.inspector.recorded import write_snapshots
from jaxpage.step.draft import NO_DRAFTS
from jaxpage.step.edits import Append, Drop, Finish, Fork, Score
from jaxpage.step.events import Both
from jaxpage.step.plan import Row, Sample, StepPlan, StepResult
from jaxpage.step.report import StepReport
from tests.support.engines import LLAMA, make_llm
from tests.support.random_checkpoints import random_checkpoint
from tests.support.running import serving, wait_until
from tests.support.sweeps import examples, few

pytestmark = pytest.mark.usefixtures("compiled_when_used", "largest_shapes", "usual_pages")

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = dataclasses.replace(GREEDY, max_tokens=90)
# holds one of the longest, or a few short ones until they grow
POOL = {"num_blocks": 17, "max_model_len": 256}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("model"), LLAMA)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with make_llm(directory, **POOL) as llm:
        llm.untouched = copy.deepcopy(llm._engine.scheduler)
        yield llm


def new_engine(
    llm: LLM, runner: Any = None, tokenizer: Any = None, parts: EngineParts = NO_PARTS
) -> Engine:
    """Makes an engine as when the LLM was built: nothing has happened, only the compiled steps are
    shared.
    """
    return Engine(
        scheduler=copy.deepcopy(llm.untouched),
        builder=llm._engine.builder,
        runner=runner or llm._engine.runner,
        tokenizer=tokenizer,
        rules=AdmissionRules(llm.memory.max_model_len, frozenset({0}), llm.config.seed),
        parts=parts,
    )


@contextmanager
def open_log(llm: LLM, path: Path, tokenizer: Any = None) -> Iterator[Engine]:
    """Gives the LLM as it was when it was built, and a log of what is done with it until it is shut
    down.
    """
    engine = new_engine(llm, tokenizer=tokenizer)
    engine.events = EventLog(path, engine_header(llm.config, engine, llm.spec))
    # not started: a stream that nobody reads stands still
    llm._driver, llm.tokenizer = Driver(engine), tokenizer
    try:
        yield engine
    finally:
        engine.abort_all()
        engine.events.closed()
        assert not engine.events._tables, "tables of sequences that are gone"
        llm._driver, llm.tokenizer = Driver(engine), None


def replay_log(llm: LLM, path: Path, runner: Any = None) -> Report:
    with LogReader(path) as log:
        read_header(log)
        log.take()
        follower = Replay(log)
        return follower.run(new_engine(llm, runner, parts=follower.parts))


def records_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def assert_identical(report: Report, path: Path) -> None:
    results = [record for record in records_of(path) if record["event"] == "result"]
    expected = Report(len(results), sum(len(result["tokens"]) for result in results), None, None)
    assert report == expected and report.num_steps > 0


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 257, length).tolist() for length in lengths]


def generate_crowd(llm: LLM, seed: int = 5) -> list[Any]:
    """Generates more than the pool holds, with every kind of parameter, and prefixes to find."""
    prompts = prompts_of(40, 61, 9, 33, 70)
    prompts += [[*prompts[1][:48], 7], [*prompts[3][:32], 9, 9]]
    params = [
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, prompt_logprobs=2),
        SamplingParams(temperature=0.9, top_p=0.9, max_tokens=30, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=1.0, seed=2**64 - 1, top_k=40, min_tokens=4, max_tokens=30),
        SamplingParams(
            temperature=1.2,
            seed=seed,
            min_p=0.01,
            max_tokens=35,
            ignore_eos=True,
            prompt_logprobs=0,
        ),
        SamplingParams(
            temperature=0.0, max_tokens=None, stop_token_ids=list(range(5, 30)), logprobs=0
        ),
        SamplingParams(temperature=0.7, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=9, cache_salt="\u00e9\U0001f9c2"),
    ]
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.fixture(scope="module")
def crowd(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logs") / "crowd.jsonl"
    with open_log(llm, path):
        generate_crowd(llm)
    return path


# ---- what is in a log


def test_a_log_tells_what_users_saw(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with open_log(llm, path):
        outputs = generate_crowd(llm)
    records = records_of(path)
    arrivals = [record for record in records if record["event"] == "arrival"]
    assert [arrival["prompt_token_ids"] for arrival in arrivals] == [
        output.prompt_token_ids for output in outputs
    ]
    assert arrivals[2]["params"] == {"top_k": 40, "min_tokens": 4, "max_tokens": 30}
    assert arrivals[2]["seed"] == 2**64 - 1 and arrivals[2]["eos_token_ids"] == [0]
    assert len({arrival["seed"] for arrival in arrivals}) == len(arrivals), "seeds are resolved"
    assert [arrival["max_total_tokens"] for arrival in arrivals][:5] == [80, 91, 39, 68, 256]

    tokens: dict[int, list[int]] = {}
    bits: dict[int, list[int]] = {}
    reasons = {}
    plan: dict[str, Any] = {}
    for record in records:
        if record["event"] == "plan":
            plan = record
        elif record["event"] == "result":
            drawn_from = plan.get("draws", range(len(plan["rows"])))
            for row, token_id in zip(drawn_from, record["tokens"], strict=True):
                tokens.setdefault(plan["rows"][row][0], []).append(token_id)
            for draw, _, token_ids, values in record.get("logprobs", []):
                assert token_ids[0] == record["tokens"][draw]
                bits.setdefault(plan["rows"][drawn_from[draw]][0], []).append(values[0])
            reasons.update({edit[1]: (edit[2], edit[3]) for edit in record.get("edits", [])})
    finals = {
        arrival["sequences"][0]: output.outputs[0]
        for arrival, output in zip(arrivals, outputs, strict=True)
    }
    assert tokens == {sequence: final.token_ids for sequence, final in finals.items()}
    assert reasons == {
        sequence: (final.finish_reason, final.stop_reason) for sequence, final in finals.items()
    }
    assert set(bits) == {1, 4}
    scores: dict[int, list[Any]] = {}
    for sequence, position, *tokens_of in itertools.chain(
        *(record.get("scores", []) for record in records)
    ):
        assert position == len(scores.setdefault(sequence, [])) + 1
        scores[sequence] += [
            dict(zip(token_ids, np.array(values, np.int32).view(np.float32).tolist(), strict=True))
            for _, token_ids, values in tokens_of
        ]
    assert scores == {
        index: [
            {token: entry.logprob for token, entry in entries.items()}
            for entries in outputs[index].prompt_logprobs[1:]
        ]
        for index in (0, 3)
    }
    for sequence, values in bits.items():
        final = finals[sequence]
        shown = [
            entries[token].logprob
            for entries, token in zip(final.logprobs, final.token_ids, strict=True)
        ]
        assert np.array(values, np.int32).view(np.float32).tolist() == shown


def test_everything_in_a_plan_and_its_edits_is_recorded() -> None:
    """Fields that no engine of this version sets are recorded, too."""
    records: list[dict[str, Any]] = []
    recorder = Recorder(records.append)
    rows = (Row(4, 30, (7, 8), ((3, 9),)), Row(5, 0, (1,), ((2,),)))
    moves = {
        "swap_out": ((3, 0), (4, 1)),
        "swap_in": ((2, 6),),
        "copies": ((5, 6),),
        "preempted": ("b", "a"),
    }
    sample = Sample(1, 0, 5, SamplingParams(), 0, 0, 1, num_logprobs=1)
    plan = StepPlan(12, rows, (sample,), **moves)
    recorder.planned(plan)
    numbers = [
        np.array(values, kind) for values, kind in (([6], "i4"), ([-0.5], "f4"), ([2], "i4"))
    ]
    tops = [np.array([[8, 6]], np.int32), np.array([[-0.25, -0.5]], np.float32)]
    score = Score(4, 31, (TokenLogprobs(8, -0.5, 2, (6,), (-0.25,)), TokenLogprobs(9, -0.25, 1)))
    edits = [score, Append(5, 6), Fork(5, 6, 1), Drop(4), Finish(5, "stop", "x")]
    recorder.stepped(StepReport(NO_DRAFTS, plan, StepResult(*numbers, *tops), edits, []))
    assert json.loads(json.dumps(records)) == [
        {
            "event": "plan",
            "step": 12,
            "rows": [[4, 30, 2], [5, 0, 1]],
            "tables": [[4, 2, [0, 3, 9]], [5, 1, [0, 2]]],
            "swap_out": [[3, 0], [4, 1]],
            "swap_in": [[2, 6]],
            "copies": [[5, 6]],
            "preempted": ["b", "a"],
            "draws": [1],
        },
        {
            "event": "result",
            "step": 12,
            "tokens": [6],
            "logprobs": [[0, 2, [6, 8], [-1090519040, -1098907648]]],  # 0xbf000000, 0xbe800000
            "scores": [[4, 31, [2, [8, 6], [-1090519040, -1098907648]], [1, [9], [-1098907648]]]],
            "edits": [["fork", 5, 6, 1], ["drop", 4], ["finish", 5, "stop", "x"]],
        },
    ]


@given(tables=st.lists(st.lists(st.integers(0, 3), max_size=6).map(tuple), max_size=8))
def test_any_table_can_be_rebuilt_from_its_changes(tables: list[tuple[int, ...]]) -> None:
    records: list[dict[str, Any]] = []
    recorder, known = Recorder(records.append), []
    for step, table in enumerate(tables):
        recorder.planned(StepPlan(step, (Row(0, 0, (1,), (table,)),), ()))
        for change in records[-1].get("tables", []):
            known = change_table(known, change)
        assert tuple(known) == table


def change_table(table: list[int], change: list[Any]) -> list[int]:
    """Returns a block table after the change that a plan tells of it."""
    _, length, *runs = change
    table = table[:length] + [0] * (length - len(table))
    for first, *blocks in runs:
        table[first : first + len(blocks)] = blocks
    return table


def test_the_header_says_which_engine_it_was(llm: LLM, crowd: Path) -> None:
    first = records_of(crowd)[0]
    assert (
        first["versions"]["jax"] == jax.__version__ and first["config"] == llm.config.model_dump()
    )
    assert (first["engine"]["num_blocks"], first["engine"]["dtype"]) == (17, "float32")
    assert first["autotuning"] is None, "XLA measures nothing on a CPU"
    stored = load_weights(llm._model.plan, "float32", np.asarray)
    assert first["weights_hash"] == weights_hash(jax.tree.map(jax.numpy.asarray, stored)), (
        "of the weights as they are in the checkpoint, not in panels"
    )


def test_every_part_of_the_weights_is_hashed(llm: LLM) -> None:
    leaf = jax.numpy.arange(6.0)
    tree = {"a": {"b": leaf}, "c": leaf.astype(jax.numpy.bfloat16)}
    others = [
        {"a": {"b": leaf.at[5].set(5.0000005)}, "c": tree["c"]},
        {"a": {"b": leaf.reshape(2, 3)}, "c": tree["c"]},
        {"a": {"b": leaf.view(jax.numpy.int32)}, "c": tree["c"]},
        {"a": {"x": leaf}, "c": tree["c"]},
        {"a": {"b": leaf}, "c": tree["c"].at[0].set(-0.0)},
        {"a": {"b": leaf}},
    ]
    assert weights_hash(copy.deepcopy(tree)) == weights_hash(tree)
    assert len({weights_hash(each) for each in (tree, *others)}) == 7


# ---- the file


def test_a_log_is_private_and_never_overwrites(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with open_log(llm, path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    for taken in (path, tmp_path):
        with pytest.raises(
            ConfigError, match="event_log: .* exists, .* name another, or remove it"
        ):
            LLM("no-such-model", event_log=taken)  # before the model is looked for
    assert path.read_bytes() == before
    dangling = tmp_path / "link"
    dangling.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="exists"):
        LLM("no-such-model", event_log=dangling)
    with pytest.raises(ConfigError, match="nowhere is not a directory that can be written to"):
        LLM("no-such-model", event_log=tmp_path / "nowhere" / "a.jsonl")


def test_a_full_disk_ends_the_log_and_nothing_else(
    llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    with open_log(llm, path) as engine:
        expected = llm.generate(prompts_of(20), GREEDY, use_tqdm=False)
        os.dup2(os.open("/dev/full", os.O_WRONLY), engine.events._file)
        assert (
            llm.generate(prompts_of(20), GREEDY, use_tqdm=False)[0].outputs == expected[0].outputs
        )
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(messages) == 1 and "No space left" in messages[0] and str(path) in messages[0]
    report = replay_log(llm, path)
    assert report == Report(12, 12, None, "The log ends without a shutdown")


def test_a_killed_process_leaves_a_log_that_is_complete(
    llm: LLM, directory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    program = f"""
import itertools, os, signal
from jaxpage import SamplingParams
from tests.support.engines import make_llm
llm = make_llm({str(directory)!r}, event_log={str(path)!r}, largest_shapes=True, **{POOL!r})
runner, calls = llm._engine.runner, itertools.count(1)
real = runner.run
def run(batch):
    if next(calls) == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(batch)
runner.run = run
llm.generate([[5] * 50, [6] * 20, [7] * 90], SamplingParams(seed=3, max_tokens=20, ignore_eos=True), use_tqdm=False)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[1], capture_output=True
    )
    assert result.returncode == -signal.SIGKILL, result.stderr.decode()
    records = records_of(path)
    assert (records[-1]["event"], records[-1]["step"]) == ("plan", 9)
    assert [record["event"] for record in records].count("arrival") == 3
    report = replay_log(llm, path)
    tokens = sum(len(record["tokens"]) for record in records if record["event"] == "result")
    assert report == Report(8, tokens, None, "The log ends in the middle of step 9") and tokens > 8


@pytest.mark.parametrize("num_bytes", [1, 20, 30])
def test_a_last_line_that_was_cut_off_ends_the_log(
    llm: LLM, crowd: Path, tmp_path: Path, num_bytes: int
) -> None:
    lines = crowd.read_bytes().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if b'"plan"' in line and b'"step":6,' in line)
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(lines[: at + 1]) + lines[at + 1][:num_bytes])
    report = replay_log(llm, cut)
    assert report.difference is None and report.num_steps == 5
    assert report.ending == "The log ends in the middle of step 6; its last line is cut off"


def test_a_whole_last_line_needs_no_newline(llm: LLM, crowd: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(crowd.read_bytes().rstrip(b"\n"))
    assert_identical(replay_log(llm, path), path)


DAMAGED = [
    (b"\n", "not a record of an event log"),
    (b'{"event":\n', "not a record"),
    (b'{"event":3}\n', "not a record"),
    (b'["event"]\n', "not a record"),
    (b'{"event":"result","step":1,"tokens":[NaN]}\n', "NaN is no JSON"),
    (b'{"event":"result","step":' + b"9" * 5000 + b"}\n", "not a record"),
    (b"[" * 100_000 + b"\n", "not a record"),
    (b"\xff\xfe\n", "not a record"),
]


@pytest.mark.parametrize(("line", "message"), DAMAGED, ids=[repr(line[:30]) for line, _ in DAMAGED])
def test_a_damaged_line_is_named_before_anything_is_loaded(
    crowd: Path, tmp_path: Path, line: bytes, message: str
) -> None:
    lines = crowd.read_bytes().splitlines(keepends=True)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join([*lines[:7], line, *lines[7:]]))
    with pytest.raises(EventLogError, match=f"a.jsonl, line 8: .*{message}"):
        replaying.replay(path, model="no-such-model")


def test_a_line_without_end_is_not_read_to_its_end(crowd: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.truncate(MAX_LINE_BYTES + 2)
    with pytest.raises(EventLogError, match="line 1: a line has more than"):
        replaying.replay(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"event": "arrival"}, "it does not begin with a header"),
        (
            {"format": 3},
            "the log has format 3; this version reads format 4. Replay it with the version that "
            "wrote it, or record a new log",
        ),
        ({"engine": None}, "engine of the header must be a dict, got None"),
        (
            {"config": {"max_num_seq": 2}},
            "max_num_seq: unknown setting; did you mean 'max_num_seqs'",
        ),
        ({"engine": {"num_blocks": "many"}}, "num_blocks: must be a valid integer, got 'many'"),
    ],
)
def test_a_header_that_is_none_is_refused(
    crowd: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    first, *others = records_of(crowd)
    with pytest.raises(EventLogError, match=f"(?s)line 1: .*{message}"):
        replaying.replay(write(tmp_path / "a.jsonl", [{**first, **change}, *others]))
    (tmp_path / "empty").touch()
    with pytest.raises(EventLogError, match="not an event log"):
        replaying.replay(tmp_path / "empty")


# ---- runs that are the same again


def test_a_crowd(llm: LLM, crowd: Path) -> None:
    assert_identical(replay_log(llm, crowd), crowd)


def test_swaps_pins_and_a_fair_policy(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    settings = {
        "num_blocks": 18,
        "preemption_mode": "swap",
        "scheduling_policy": "fair",
        "enable_mixed_steps": True,
    }
    with make_llm(directory, event_log=str(path), **settings) as llm:
        system, *prompts = prompts_of(21, 40, 61, 9, 33, 70)
        pinned = llm.pin_prefix(system)
        params = [dataclasses.replace(LONG, max_tokens=60, user=user) for user in "aabab"]
        llm.generate([[*system, *prompt] for prompt in prompts], params, use_tqdm=False)
        pinned.release()
        llm.generate(prompts, GREEDY, use_tqdm=False)
    records = records_of(path)
    assert {"pin", "unpin", "end"} <= {record["event"] for record in records}
    assert all(
        any(name in record for record in records)
        for name in ("swap_out", "swap_in", "copies", "preempted")
    )
    assert_identical(replaying.replay(path, progress=False), path)
    index = next(i for i, record in enumerate(records) if record["event"] == "unpin")
    del records[index]
    records[0]["autotuning"] = "0" * 64
    difference = replaying.replay(write(tmp_path / "b.jsonl", records), progress=False).difference
    assert difference is not None and difference.startswith("First difference")
    others = f"XLA's autotuning chose other kernels for the log (hash '{'0' * 64}', here None)"
    assert others in caplog.text and difference.endswith(f"\n{others}: bits may differ")


def test_choices_that_a_log_does_not_have_are_no_others() -> None:
    ours = {"autotuning": "1"}
    assert _other_choices({}, ours) == _other_choices({"autotuning": None}, ours) == ""
    assert (
        _other_choices({"autotuning": "1"}, ours) == "" != _other_choices({"autotuning": "2"}, ours)
    )


def test_a_failed_step(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    with open_log(llm, path) as engine:
        with monkeypatch.context() as patch:
            fail_at(patch, engine.runner, 4, RuntimeError("RESOURCE_EXHAUSTED: planted"))
            outputs = generate_crowd(llm)
        assert "error" in {output.outputs[0].finish_reason for output in outputs}
        llm.generate(prompts_of(40, 61), GREEDY, use_tqdm=False)
    failures = [record for record in records_of(path) if record["event"] == "failure"]
    assert [(record["step"], record["error"]) for record in failures] == [
        (4, "RuntimeError: RESOURCE_EXHAUSTED: planted")
    ]
    assert_identical(replay_log(llm, path), path)


def fail_at(patch: pytest.MonkeyPatch, runner: Any, step: int, error: BaseException) -> None:
    """Makes a step take the pages, and raise."""
    real, calls = runner.run, itertools.count(1)

    def run(batch: Any) -> Any:
        if next(calls) != step:
            return real(batch)
        runner.executables.step(batch.bucket)(runner.parameters, runner._pages, batch.packed)
        raise error

    patch.setattr(runner, "run", run)


def test_a_step_that_broke_off(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can neither be taken nor be failed: all requests end, and the pages are made anew."""
    path = tmp_path / "a.jsonl"
    with open_log(llm, path) as engine:
        stream = llm.stream(prompts_of(70)[0], GREEDY)
        next(stream)
        real, calls = engine.scheduler.commit, itertools.count(1)

        def failing(*arguments: Any) -> Any:
            return real(*arguments) if next(calls) != 5 else 1 / 0

        with monkeypatch.context() as patch:
            patch.setattr(engine.scheduler, "commit", failing)
            with pytest.raises(EngineFailed) as caught:
                generate_crowd(llm)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(EngineFailed):
            list(stream)
        llm.generate(prompts_of(40, 61), GREEDY, use_tqdm=False)
    events = [record["event"] for record in records_of(path)]
    assert events.count("rebuild") == 1 and events.count("plan") == events.count("result") + 1
    assert_identical(replay_log(llm, path), path)


def test_an_error_of_one_request(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    with open_log(llm, path), monkeypatch.context() as patch:
        real, calls = SamplingStrategy.advance, itertools.count()

        def failing(self: Any, *arguments: Any) -> Any:
            if next(calls) == 17:
                raise KeyError("planted")
            return real(self, *arguments)

        patch.setattr(SamplingStrategy, "advance", failing)
        outputs = generate_crowd(llm)
    assert [output.outputs[0].finish_reason for output in outputs].count("error") == 1
    assert_identical(replay_log(llm, path), path)


def test_logits_that_are_no_numbers(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, path = llm._engine.runner, tmp_path / "a.jsonl"
    real = runner.run

    def poison(batch: Any) -> StepResult:
        """Makes logits that are not finite follow token 11 at the end of a prompt."""
        result = real(batch)
        bad = np.array(
            [11 in batch.packed[:64].tolist()] + [False] * (len(result.token_ids) - 1), bool
        )
        return dataclasses.replace(
            result, token_ids=np.where(bad[: len(result.token_ids)], -1, result.token_ids)
        )

    monkeypatch.setattr(runner, "run", poison)
    with open_log(llm, path):
        outputs = llm.generate([[11] * 20, *prompts_of(30, 8)], GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert "reset" in [record["event"] for record in records_of(path)]
    assert_identical(replay_log(llm, path), path)
    monkeypatch.undo()
    assert "tokens[0] of sequence 0 of its result\n  logged:    -1" in (
        replay_log(llm, path).difference or ""
    )


class Letters:
    """Is a tokenizer whose token ids are letters."""

    decoder = None

    @property
    def backend_tokenizer(self) -> Letters:
        return self

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token_id % 26) for token_id in token_ids)

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {}

    def id_to_token(self, token_id: int) -> str:
        return self.decode([token_id])


@pytest.mark.parametrize("n", [3, 4])
def test_samples_are_replayed(llm: LLM, tmp_path: Path, n: int) -> None:
    """Their forks follow from the plan; some end at their first token by a stop string, and a step
    that fails has them all.
    """
    path = tmp_path / "a.jsonl"
    params = SamplingParams(
        n=n, best_of=4, temperature=1.0, seed=4, max_tokens=16, ignore_eos=True, stop=["q", "z"]
    )
    with open_log(llm, path, tokenizer=Letters()) as engine:
        outputs = llm.generate(prompts_of(20, 40, 1, 16), params, use_tqdm=False)
        waiting = llm.stream(prompts_of(20)[0], dataclasses.replace(params, n=4))
        waiting.close()
        assert llm.stats()["num_requests_waiting"] == 0 and not engine._groups
    assert [len(output.outputs) for output in outputs] == [n] * 4
    records = records_of(path)
    assert [arrival["sequences"] for arrival in records if arrival["event"] == "arrival"][1] == [
        4,
        5,
        6,
        7,
    ]
    edits = [
        edit
        for record in records
        if record["event"] == "result"
        for edit in record.get("edits", [])
    ]
    assert [edit for edit in edits if edit[0] == "fork"][:3] == [
        ["fork", 0, 1, 1],
        ["fork", 0, 2, 2],
        ["fork", 0, 3, 3],
    ]
    assert ("logprobs" in next(record for record in records if record.get("tokens"))) == (
        n == 3
    )  # best_of ranks by them
    assert_identical(replay_log(llm, path), path)


def test_beam_searches_are_replayed(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are preempted beside others, refused between others, and one ends with an error on the
    way to text.
    """
    path = tmp_path / "a.jsonl"
    prompts = prompts_of(130, 33, 30, 9, 70)
    params = [
        LONG,
        BeamSearchParams(3, 20, ignore_eos=True),
        BeamSearchParams(4, 20, 2.0, "never", n=2, stop_token_ids=range(100, 130)),
        SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True),
        BeamSearchParams(2, 20),
    ]
    real, calls = BeamStrategy._grow, itertools.count()

    def failing(*arguments: Any) -> Any:
        if next(calls) == 40:
            raise KeyError("planted")
        return real(*arguments)

    with open_log(llm, path, tokenizer=Letters()) as engine, monkeypatch.context() as patch:
        patch.setattr(BeamStrategy, "_grow", failing)
        with pytest.raises(CapacityError):
            engine.add("refused", engine.prepare(None, prompts[0], BeamSearchParams(5)))
        outputs = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate(prompts, params, use_tqdm=False)
        assert not engine._groups
    reasons = [{hypothesis.finish_reason for hypothesis in output.outputs} for output in outputs]
    assert reasons.count({"error"}) == 1
    assert sum(output.metrics.num_preemptions for output in (*outputs, *again)) > 0
    records = records_of(path)
    arrivals = [record for record in records if record["event"] == "arrival"]
    assert arrivals[2]["beam"] == {
        "beam_width": 4,
        "max_tokens": 20,
        "length_penalty": 2.0,
        "early_stopping": "never",
        "n": 2,
        "stop_token_ids": list(range(100, 130)),
    }
    assert "params" not in arrivals[2] and arrivals[2]["seed"] == 0
    assert [arrival["sequences"] for arrival in arrivals][:3] == [
        [0],
        [*range(1, 7)],
        [*range(7, 15)],
    ]
    edits = [
        edit
        for record in records
        if record["event"] == "result"
        for edit in record.get("edits", [])
    ]
    assert {"fork", "drop", "finish"} == {edit[0] for edit in edits}
    assert_identical(replay_log(llm, path), path)
    forks = [
        i
        for i, record in enumerate(records)
        if any(edit[0] == "fork" for edit in record.get("edits", []))
    ]
    records[forks[3]]["edits"].pop()
    changed_log = write(tmp_path / "b.jsonl", records)
    assert f"(line {forks[3] + 1})" in (replay_log(llm, changed_log).difference or "")
    monkeypatch.setattr(BeamStrategy, "_is_over", lambda *_: True)
    assert "edits" in (replay_log(llm, path).difference or "")


def test_stop_strings_need_no_text(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    params = SamplingParams(
        temperature=1.0, seed=4, max_tokens=40, ignore_eos=True, stop=["ab", "q", "zz"]
    )
    with open_log(llm, path, tokenizer=Letters()):
        outputs = llm.generate(prompts_of(20, 40, 61, 5), params, use_tqdm=False)
    assert {"q"} <= {output.outputs[0].stop_reason for output in outputs}
    assert_identical(replay_log(llm, path), path)


def test_what_a_stop_string_ended_is_served_in_a_replay_too(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fair policy counts the tokens of every user, the last of a text included."""
    fair = copy.deepcopy(llm.untouched)
    fair._requests._queue = POLICIES["fair"]()
    monkeypatch.setattr(llm, "untouched", fair)
    path = tmp_path / "a.jsonl"
    any_letter = SamplingParams(
        max_tokens=9, ignore_eos=True, stop=list(string.ascii_lowercase), user="a"
    )
    one_token = SamplingParams(max_tokens=1, ignore_eos=True, user="b")
    with open_log(llm, path, tokenizer=Letters()):
        outputs = llm.generate(
            prompts_of(*[5, 4] * 10), [any_letter, one_token] * 10, use_tqdm=False
        )
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop", "length"] * 10
    assert_identical(replay_log(llm, path), path)


class Speller(Letters):
    """Spells letters that are read as well."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {
            "input_ids": [30] * text.startswith(" ") + [ord(letter) - 97 for letter in text.strip()]
        }


def test_words_and_processors_need_no_text(llm: LLM, tmp_path: Path) -> None:
    """A log has bad words as tokens, so that a replay forbids what the logged engine forbade; also
    one that forbids everything.
    """
    path = tmp_path / "a.jsonl"
    params = SamplingParams(
        temperature=1.0, seed=4, max_tokens=12, ignore_eos=True, allowed_token_ids=range(6)
    )
    params = dataclasses.replace(params, bad_words=["ab", "c"])
    penalised = dataclasses.replace(
        params, logit_bias={2: 3.5, 1: -0.1}, presence_penalty=0.3, repetition_penalty=1.1
    )
    hopeless = dataclasses.replace(
        params, allowed_token_ids=[0, 1], bad_words=["aa", "ab", "ba", "bb"], n=2
    )
    with open_log(llm, path, tokenizer=Speller()):
        outputs = llm.generate(prompts_of(20, 40, 9), [params, penalised, hopeless], use_tqdm=False)
    assert [output.finish_reason for output in outputs[2].outputs] == ["error"] * 2
    records = records_of(path)
    arrivals = [record for record in records if record["event"] == "arrival"]
    assert arrivals[0]["bad_word_token_ids"] == [[0, 1], [2]]
    assert not any(record["event"] == "reset" for record in records), "what is cached may stay"
    assert_identical(replay_log(llm, path), path)
    arrivals[0]["bad_word_token_ids"] = [[0, 1], [2], [outputs[0].outputs[0].token_ids[3]]]
    assert step_of(replay_log(llm, write(path, records))) <= 6
    for wrong in ([[]], [[257]], [5], [["a"]]):
        arrivals[0]["bad_word_token_ids"] = wrong
        with pytest.raises(EventLogError, match="this arrival cannot be replayed"):
            replay_log(llm, write(path, records))


def test_a_refused_request_leaves_no_trace(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with open_log(llm, path) as engine:
        engine.add("a", engine.prepare(None, [1, 2, 3], GREEDY))
        with pytest.raises(ValueError, match="exists already"):
            engine.add("a", engine.prepare(None, [4, 5, 6], GREEDY))
        engine.add(
            "b", engine.prepare(None, [4, 5, 6], dataclasses.replace(GREEDY, temperature=1.0))
        )
        while engine.has_unfinished:
            engine.step()
    assert_identical(replay_log(llm, path), path)


# ---- runs that are not


def step_of(report: Report) -> int:
    assert report.difference is not None, "the change was not found"
    return int(report.difference.removeprefix("First difference: step ").split()[0])


def find(records: list[dict[str, Any]], event: str, has: str = "", nth: int = 0) -> int:
    places = [
        i
        for i, record in enumerate(records)
        if record["event"] == event and (not has or record.get(has))
    ]
    return places[nth]


def flip(values: list[Any], index: int = 0) -> None:
    values[index] ^= 1


CHANGES: dict[str, tuple[str, str, int, Any]] = {
    "a token": ("result", "tokens", 9, lambda record: flip(record["tokens"])),
    "a token too many": ("result", "tokens", 5, lambda record: record["tokens"].append(3)),
    "a bit of a log probability": (
        "result",
        "logprobs",
        3,
        lambda record: flip(record["logprobs"][-1][3], -1),
    ),
    "a bit of a score": (
        "result",
        "scores",
        0,
        lambda record: flip(record["scores"][0][-1][2], -1),
    ),
    "a rank of a score": ("result", "scores", 1, lambda record: flip(record["scores"][0][2], 0)),
    "a reason to finish": (
        "result",
        "edits",
        1,
        lambda record: record["edits"][0].__setitem__(2, "abort"),
    ),
    "a block": ("plan", "tables", 7, lambda record: flip(record["tables"][0][2], 1)),
    "the length of a block table": (
        "plan",
        "tables",
        4,
        lambda record: flip(record["tables"][-1], 1),
    ),
    "who is computed": ("plan", "rows", 11, lambda record: flip(record["rows"][0], 0)),
    "where": ("plan", "rows", 11, lambda record: flip(record["rows"][0], 1)),
    "how much": ("plan", "rows", 2, lambda record: flip(record["rows"][-1], 2)),
    "the order of rows": ("plan", "rows", 11, lambda record: record["rows"].reverse()),
    "who was preempted": (
        "plan",
        "preempted",
        0,
        lambda record: record["preempted"].append("request-9"),
    ),
    "that somebody was preempted": ("plan", "preempted", 0, lambda record: record.pop("preempted")),
    "a copy": ("plan", "rows", 20, lambda record: record.update(copies=[[1, 2]])),
    "a swap": ("plan", "rows", 20, lambda record: record.update(swap_out=[[1, 2]])),
    "what is drawn": ("plan", "draws", 0, lambda record: record.pop("draws")),
    "the end of sequence": ("arrival", "", 1, lambda record: record.update(eos_token_ids=[4])),
    "the length": ("arrival", "", 1, lambda record: record.update(max_total_tokens=50)),
    "the sequence": ("arrival", "", 1, lambda record: record.update(sequences=[7])),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_the_log_is_found_where_it_is(
    llm: LLM, crowd: Path, tmp_path: Path, what: str
) -> None:
    event, has, nth, change = CHANGES[what]
    records = records_of(crowd)
    place = find(records, event, has, nth)
    change(records[place])
    report = replay_log(llm, write(tmp_path / "a.jsonl", records))
    assert step_of(report) == records[place]["step"] and f"(line {place + 1})" in (
        report.difference or ""
    )
    assert report.num_steps == sum(record["event"] == "result" for record in records[:place])


def test_how_a_difference_reads(llm: LLM, crowd: Path, tmp_path: Path) -> None:
    records = records_of(crowd)
    place = find(records, "plan", "tables", 7)
    change = records[place]["tables"][0]
    was = json.loads(json.dumps(change))
    flip(change[2], 1)
    assert replay_log(llm, write(tmp_path / "a.jsonl", records)).difference == (
        f"First difference: step {records[place]['step']} (line {place + 1}), tables[0] of its "
        f"plan\n"
        f"  logged:    {change}\n"
        f"  came out:  {was}\n"
        "  (tables: [sequence, blocks, [first place that changed, block, block, ...], ...])"
    )


def test_another_seed_shows_where_two_runs_part(llm: LLM, crowd: Path, tmp_path: Path) -> None:
    """The place is found by laying the logs of two runs side by side."""
    with open_log(llm, tmp_path / "other.jsonl"):
        generate_crowd(llm, seed=6)
    records, others = records_of(crowd), records_of(tmp_path / "other.jsonl")
    arrival = next(
        i for i, (record, other) in enumerate(zip(records, others, strict=False)) if record != other
    )
    assert records[arrival]["event"] == "arrival"
    records[arrival] = others[arrival]
    place = next(
        i for i, (record, other) in enumerate(zip(records, others, strict=False)) if record != other
    )
    report = replay_log(llm, write(tmp_path / "a.jsonl", records))
    assert step_of(report) == records[place]["step"] and f"(line {place + 1}), tokens[" in (
        report.difference or ""
    )


def test_a_missing_event_shows_where_it_is_missed(llm: LLM, crowd: Path, tmp_path: Path) -> None:
    path, records = tmp_path / "a.jsonl", records_of(crowd)
    last = find(records, "arrival", nth=-1)
    [sequence] = records[last]["sequences"]
    used = next(
        r["step"]
        for r in records
        if r["event"] == "plan" and sequence in [row[0] for row in r["rows"]]
    )
    assert step_of(replay_log(llm, write(path, records[:last] + records[last + 1 :]))) == used
    assert "sequences[0] of its arrival" in (
        replay_log(llm, write(path, records[:3] + records[4:])).difference or ""
    )

    plan = find(records, "plan", nth=10)
    with pytest.raises(
        EventLogError, match=f"line {plan + 1}: the log has no cause for this result of step 11"
    ):
        replay_log(llm, write(path, records[:plan] + records[plan + 1 :]))
    # as if interrupted
    assert step_of(replay_log(llm, write(path, records[: plan + 1] + records[plan + 2 :]))) == 12


def test_an_abort_too_few_or_too_many(llm: LLM, crowd: Path, tmp_path: Path) -> None:
    path, records = tmp_path / "a.jsonl", records_of(crowd)
    place = find(records, "plan", nth=10)
    running = records[find(records, "arrival")]["request_id"]
    abort = {"event": "abort", "step": records[place - 1]["step"], "request_id": running}
    many = write(path, [*records[:place], abort, *records[place:]])
    assert step_of(replay_log(llm, many)) == records[place]["step"]
    unknown = write(path, [*records[:place], {**abort, "request_id": "x"}, *records[place:]])
    assert "came out:  nothing" in (replay_log(llm, unknown).difference or "")

    with open_log(llm, tmp_path / "b.jsonl"):
        stream = llm.stream(prompts_of(50)[0], GREEDY)
        next(stream)
        stream.close()
        llm.generate(prompts_of(9), GREEDY, use_tqdm=False)
    records = records_of(tmp_path / "b.jsonl")
    records.pop(find(records, "abort"))
    assert step_of(replay_log(llm, write(path, records))) == 2


def test_an_engine_that_plans_otherwise(llm: LLM, crowd: Path) -> None:
    """Without prefix caching the first difference is a row that begins neither at 0 nor where its
    sequence stood.
    """
    stands: dict[int, int] = {}
    step_id = 0
    for record in records_of(crowd):
        for sequence, start, num_tokens in record.get("rows", []):
            if not step_id and start not in (0, stands.get(sequence)):
                step_id = record["step"]
            stands[sequence] = start + num_tokens
    with LogReader(crowd) as log:
        read_header(log)
        log.take()
        follower = Replay(log)
        engine = new_engine(llm, parts=follower.parts)
        engine.scheduler.block_manager.cached = None
        assert step_of(follower.run(engine)) == step_id > 0


def test_a_step_that_fails_only_now(llm: LLM, crowd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, llm._engine.runner, 5, ValueError("planted"))
    report = replay_log(llm, crowd)
    assert step_of(report) == 5 and "came out:  failure {'error': 'ValueError: planted'}" in (
        report.difference or ""
    )
    monkeypatch.undo()
    llm._engine.runner.rebuild_pages()


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_token_ids": [1, 999]},
        {"prompt_token_ids": None},
        {"prompt_token_ids": ["1"]},
        {"request_id": []},
        {"seed": -1.5},
        {"params": {"temperature": "hot"}},
        {"params": {"no_such": 1}},
        {"params": None},
        {"params": {"n": 5}},
        {"request_id": "request-0"},
    ],
    ids=str,
)
def test_an_arrival_that_makes_no_sense_is_refused(
    llm: LLM, crowd: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    records = records_of(crowd)
    records[2] |= change
    with pytest.raises(EventLogError, match="line 3: this arrival cannot be replayed: "):
        replay_log(llm, write(tmp_path / "a.jsonl", records))


# ---- every history


class Probabilities:
    """Is a runner without a device.

    Its draws depend on all that a step is given, block tables included.
    """

    def run(self, batch: Any) -> StepResult:
        seed = zlib.crc32(
            batch.packed.tobytes() + b"".join(pairs.tobytes() for _, pairs in batch.copies)
        )
        rng = np.random.default_rng(seed)
        result = self.results(rng, batch.num_draws, -1 if seed % 20 == 0 else 0)
        return dataclasses.replace(
            result, scored=self.results(rng, batch.num_scored, 0) if batch.num_scored else None
        )

    def results(self, rng: np.random.Generator, count: int, minimum: int) -> StepResult:
        token_ids = rng.integers(minimum, 257, count).astype(np.int32)
        floats = rng.standard_normal((count, 21), np.float32)
        return StepResult(
            token_ids, floats[:, 0], token_ids, np.tile(token_ids[:, None], 20), floats[:, 1:]
        )

    def rebuild_pages(self) -> None:
        """Does nothing: there are none."""


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    max_tokens=st.integers(1, 60),
    seed=st.none() | st.integers(0, 2**64 - 1),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 3),
    prompt_logprobs=st.none() | st.none() | st.integers(0, 3),
    cache_salt=st.none() | st.just("salt"),
)
BEAMS = st.builds(
    BeamSearchParams,
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from([-1.0, 1.0, 2.0]),
    st.sampled_from([False, True, "never"]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), range(1, 60)]),
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3), st.integers(1, 150), PARAMS | BEAMS),
        st.tuples(st.just("step"), st.integers(1, 25)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.sampled_from(["fail", "interrupt", "reset"])),
    ),
    min_size=5,
    max_size=30,
)


def act(engine: Engine, actions: list[Any]) -> None:
    """Does these things to an engine, and then whatever is left to do."""
    runner: Any = engine.runner
    texts = [np.random.default_rng(seed).integers(1, 257, 150).tolist() for seed in range(4)]
    names = itertools.count()

    def fails(error: BaseException) -> Any:
        def run(batch: Any) -> Any:
            raise error

        return run

    for action in [*actions, ("step", 10_000)]:
        match action:
            case ("add", text, length, params):
                with suppress(CapacityError):  # so many beams
                    engine.add(str(next(names)), engine.prepare(None, texts[text][:length], params))
            case ("step", count):
                for _ in range(count):
                    if not engine.has_unfinished:
                        break
                    engine.step()
            case ("abort", number):
                engine.abort(str(number))
            case ("fail",) if engine.has_unfinished:
                runner.run = fails(RuntimeError("planted"))
                engine.step()
                del runner.run
            case ("interrupt",) if engine.has_unfinished:
                runner.run = fails(KeyboardInterrupt())
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
                del runner.run
                engine.rebuild_pages()
            case ("reset",):
                engine.reset_prefix_cache()
        engine.scheduler.check()


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields where the integers of a record are."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, key))
    elif type(value) is int:
        yield path


@examples(15)
@given(actions=ACTIONS, data=st.data())
def test_every_history_can_be_replayed_and_every_number_counts(
    llm: LLM, tmp_path_factory: pytest.TempPathFactory, actions: list[Any], data: st.DataObject
) -> None:
    logging.disable(logging.CRITICAL)
    try:
        path = tmp_path_factory.mktemp("history") / "a.jsonl"
        engine = new_engine(llm, Probabilities())
        engine.events = log = EventLog(path, HEADER)
        act(engine, actions)
        log.closed()
        report = replay_log(llm, path, Probabilities())
        assert report.difference is None and report.ending is None

        records = records_of(path)
        numbers = [
            i
            for i, record in enumerate(records)
            if record["event"] in ("plan", "result", "arrival")
        ]
        if not numbers:
            return
        place = data.draw(st.sampled_from(numbers), label="line")
        *way, last = data.draw(st.sampled_from(list(leaves(records[place]))), label="number")
        target = records[place]
        for key in way:
            target = target[key]
        target[last] += 1
        try:
            difference = replay_log(
                llm, write(path.with_name("b.jsonl"), records), Probabilities()
            ).difference
        except EventLogError as error:  # an arrival that is none any more
            assert records[place]["event"] == "arrival" and f"line {place + 1}:" in str(error)
            return
        # decide something only if it comes to that
        if {"params", "beam", "seed", "prompt_token_ids"} & {*way, last}:
            return
        assert difference is not None
        line = int(difference.partition("(line ")[2].partition(")")[0])
        assert line == place + 1 or (records[place]["event"] == "arrival" and line > place)
    finally:
        logging.disable(logging.NOTSET)


HEADER = {
    "event": "header",
    "format": 4,
    "versions": {},
    "device": "",
    "config": {},
    "config_hash": "",
    "weights_hash": "",
    "engine": {},
}


# ---- the command


def run(*words: str) -> int:
    try:
        return cli.main(words)
    except SystemExit as error:
        return int(error.code or 0)


def test_the_command(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    with make_llm(directory, event_log=str(path), **POOL) as llm:
        generate_crowd(llm)
    results = [record for record in records_of(path) if record["event"] == "result"]
    capsys.readouterr()
    assert run("replay", str(path)) == 0
    out = capsys.readouterr().out
    assert (
        out == f"{len(results)} steps, {sum(len(r['tokens']) for r in results)} tokens, identical\n"
    )
    assert run("replay", str(tmp_path / "none")) == 2
    assert "there is no event log" in capsys.readouterr().err
    (tmp_path / "text").write_text("Once upon a time\n")
    assert run("replay", str(tmp_path / "text")) == 1
    assert "text, line 1: not a record of an event log" in capsys.readouterr().err
    shown = tmp_path / "shown.jsonl"
    broken = write(tmp_path / "broken.jsonl", [*records_of(path)[:9], {"event": "no such event"}])
    assert run("replay", str(broken), "--snapshots", str(shown)) == 1 and not shown.exists()
    assert run("replay", str(path), "--snapshots", str(shown), "--model", "no-such-model") != 0
    assert not shown.exists(), "the same command can be given again"


def test_the_command_with_another_engine(
    llm: LLM,
    crowd: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = random_checkpoint(tmp_path / "other", LLAMA, seed=1)
    records = records_of(crowd)
    with make_llm(other, **POOL) as strange:
        strange.untouched = copy.deepcopy(strange._engine.scheduler)
        monkeypatch.setattr(strange._engine.runner, "close", lambda: None)

        def rebuilt(config: Any, hooks: Hooks) -> Built:
            assert config.model == str(other) and config.num_blocks == 17
            assert "gpu_memory_utilization" not in config.explicit_settings(), "nobody had set it"
            return Built(
                new_engine(strange, parts=hooks.parts), None, {}, strange.spec, strange._model
            )

        monkeypatch.setattr(replaying, "build_engine", rebuilt)
        words = ("replay", str(crowd), "--model", str(other))
        assert run(*words) == 1
        out, err = capsys.readouterr()
        assert (
            out == ""
            and f"the weights of '{other}' are not those of the log" in err
            and "--force" in err
        )

        assert run(*words, "--force") == 1
        assert capsys.readouterr().out.startswith("First difference: step 1 (line 10), tokens[")
        assert "Replaying all the same: the weights" in caplog.text

        runner = strange._engine.runner
        records[0]["weights_hash"] = weights_hash(runner.parameters["target"], runner.packed)
        records[0]["versions"]["jax"] = "0.0.1"
        records[0]["config"]["seed"] = 3
        records[0]["engine"]["limits"]["max_rows"] = 5
        change_table = write(tmp_path / "a.jsonl", records)
        assert run("replay", str(change_table), "--model", str(other)) == 1
        err = capsys.readouterr().err
        assert (
            "the settings in the log were changed" in err
            and "'max_rows': 5" in err
            and "weights" not in err
        )
        assert f"jax 0.0.1, and this is {jax.__version__}" in caplog.text
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("scene", "copies", "preempts"),
    [
        ("preemption", False, True),
        *(
            pytest.param(*values, marks=pytest.mark.sweep)
            for values in (
                ("parallel sampling (figure 8)", True, False),
                ("two requests (figures 5 to 7)", False, False),
                ("beam search (figure 9)", True, False),
                ("shared prefix (figure 10)", False, False),
                ("mixed decoding", True, False),
            )
        ),
    ],
)
def test_scenes_for_the_page_show_what_they_say(
    scene: str, copies: bool, preempts: bool, tmp_path: Path
) -> None:
    path = tmp_path / "scene.jsonl"
    scenes = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "scenes.py"))
    scenes["record"](scene, path)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    plans = [event for event in events if event["event"] == "plan"]
    assert any(plan.get("copies") for plan in plans) == copies
    assert any(plan.get("preempted") and plan.get("swap_out") for plan in plans) == preempts
    assert cli.main(["replay", str(path)]) in (None, 0)


# ---- looking into a log, and incidents


def as_read(record: dict[str, Any]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(json.dumps(record))
    return value


@pytest.mark.parametrize("seed", few([0, 1], [1]))
def test_a_walk_is_the_engine_and_a_ring_is_a_walk(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """They are compared after every step of samples, beams, aborts and preemptions.

    Records that fell out of the ring are in its snapshot.
    """
    engine, walk, plans = new_engine(llm), Walk(), []
    ring, hidden = (IncidentRing(4, keeps_token_ids=keeps) for keeps in (True, False))
    recorder = Recorder(lambda record: walk.follow(as_read(record)))
    engine.events = Both(recorder, Both(ring, hidden))
    real = engine.builder.build

    def build(plan: Any, *masks: Any) -> Any:
        plans.append(plan)
        assert [walk.sequences[row.sequence_id].tables[0] for row in plan.rows] == [
            list(row.block_tables[0]) for row in plan.rows
        ]
        return real(plan, *masks)

    monkeypatch.setattr(engine.builder, "build", build)

    def compare() -> None:
        scheduler = engine.scheduler
        assert walk.arrivals.keys() == {
            item.request.request_id for item in (*scheduler.running, *scheduler.waiting)
        }
        for group in scheduler.running:
            for sequence in group.unfinished:
                drawn = sequence.token_ids[sequence.num_prompt_tokens :]
                known = [None] * len(drawn) if group.request.beam else drawn
                assert walk.sequences[sequence.sequence_id].token_ids == known
        assert {item for item, sequence in walk.sequences.items() if not sequence.is_running} == {
            sequence.sequence_id for group in scheduler.waiting for sequence in group.unfinished
        }
        snapshot, again = ring.read_ring("x"), Walk()
        for record in snapshot.records:
            again.follow(as_read(record))
        assert as_read(again.snapshot()) == as_read(walk.snapshot())
        assert snapshot.num_steps == min(4, len(plans)) and (
            snapshot.why_not_replayable is None
        ) == (len(plans) <= 4)
        text, less = json.dumps(hidden.read_ring("x").records), Walk()
        assert not any(
            secret in text for secret in ("prompt_token_ids", "salt", 'logprobs": [', "scores")
        )
        for record in json.loads(text):
            less.follow(record)
        for item, sequence in again.sequences.items():
            assert less.sequences[item].token_ids == [None] * len(sequence.token_ids)
            assert less.sequences[item].tables == sequence.tables

    rng, waiting = np.random.default_rng(seed), prompts_of(*[9, 40, 33, 17] * 4, seed=seed)
    params: list[Any] = [
        SamplingParams(n=3, max_tokens=12, seed=4, ignore_eos=True, cache_salt="salt"),
        dataclasses.replace(LONG, max_tokens=150, prompt_logprobs=1),
        BeamSearchParams(2, max_tokens=9),
        SamplingParams(temperature=0.9, seed=3, max_tokens=30),
    ]
    while waiting or engine.has_unfinished:
        if waiting and rng.random() < 0.6:
            requested = engine.prepare(None, waiting.pop(), params[len(waiting) % len(params)])
            engine.add(f"request-{len(waiting)}", requested)
        if rng.random() < 0.02:
            engine.abort(f"request-{rng.integers(16)}")
        if engine.step():
            compare()
    assert any(plan.preempted for plan in plans) and len(plans) > 50


def test_scrubbed_records_have_lengths_alone() -> None:
    params = {"stop": ["secret"], "temperature": 0.5, "user": "secret", "logit_bias": [[7, 1.0]]}
    arrival = {
        "event": "arrival",
        "prompt_token_ids": [7, 7],
        "params": params,
        "bad_word_token_ids": [[7]],
    }
    assert scrub(arrival) == {
        "event": "arrival",
        "num_prompt_tokens": 2,
        "params": {"temperature": 0.5},
    }
    plan = {"event": "plan", "rows": [[0, 3, 3]], "drafts": [[0, [7, 8], [0, 0], [[7], [1]]]]}
    assert scrub(plan)["drafts"] == [[0, [None, None]]]
    result = {
        "event": "result",
        "tokens": [7, -1],
        "logprobs": [[0, 1, [7], [5]]],
        "scores": [[0, 1]],
    }
    result["edits"] = [["finish", 0, "stop", "secret", 1], ["fork", 0, 1, 1]]
    edits = [["finish", 0, "stop", None, 1], ["fork", 0, 1, 1]]
    assert scrub(result) == {"event": "result", "tokens": [None, -1], "edits": edits}


def test_the_command_looks_into_logs(
    llm: LLM,
    crowd: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def out(*words: str, status: int = 0) -> str:
        assert run("replay", *words) == status
        return capsys.readouterr().out

    records = records_of(crowd)
    arrivals = [record for record in records if record["event"] == "arrival"]
    request_id, sequence_id = arrivals[1]["request_id"], arrivals[1]["sequences"][0]
    lines = out(str(crowd), "--request", request_id).splitlines()
    assert lines[0].startswith(
        f"step 0    arrived: {len(arrivals[1]['prompt_token_ids'])} prompt tokens"
    )
    drawn, plan = [], {}
    for record in records:
        plan = record if record["event"] == "plan" else plan
        if record["event"] == "result":
            draws = zip(plan.get("draws", range(len(plan["rows"]))), record["tokens"], strict=True)
            drawn += [token for row, token in draws if plan["rows"][row][0] == sequence_id]
    said = [line.rpartition("drew [")[2].partition("]")[0] for line in lines if "drew [" in line]
    assert list(map(int, said)) == drawn and lines[-1].endswith(
        f"sequence {sequence_id} ended: length"
    )
    assert run("replay", str(crowd), "--request", "no") == 2
    assert "has no request 'no'; it has request-0, request-1" in capsys.readouterr().err
    # Two runs part where a comparison of lines says.
    other = tmp_path / "other.jsonl"
    with open_log(llm, other):
        generate_crowd(llm, seed=6)
    pairs = zip(records[1:], records_of(other)[1:], strict=False)
    line, (ours, _) = next(
        (line, pair) for line, pair in enumerate(pairs, start=2) if pair[0] != pair[1]
    )
    assert out(str(crowd), "--diff", str(other), status=1).startswith(
        f"First difference: step {ours['step']} (line {line}), seed of its arrival\n  {crowd}:"
    )
    # What differs in the headers of two logs of one engine, whatever their paths are, and what does
    # not.
    again, [head, *events] = tmp_path / "again.jsonl", records
    moved = {**head["config"], "model": "/elsewhere", "event_log": str(again)}
    for changes, said in (
        ({"config": moved, "config_hash": "0" * 32, "incident": {"reason": "asked"}}, []),
        ({"config": moved, "weights_hash": "0" * 32}, ["config.model", "weights_hash"]),
        ({"config": {**moved, "seed": 7}}, ["config.seed"]),
    ):
        write(again, [{**head, **changes}, *events])
        assert run("replay", str(crowd), "--diff", str(again)) == 0
        shown = capsys.readouterr()
        assert shown.out == "The events are identical\n"
        assert [line.split(": ")[1] for line in shown.err.splitlines()] == said
    first, *_, last = (record["step"] for record in records if record["event"] == "plan")
    for step in (first - 1, last + 1):
        for words in ([], ["--state"], ["--request", request_id], ["--diff", str(crowd)]):
            assert run("replay", str(crowd), "--until", str(step), *words) == 2
            assert f"--until {step}: {crowd} has steps {first} to {last}" in capsys.readouterr().err
    states = [
        out(str(crowd), "--state", "--until", str(step)).splitlines()[0]
        for step in range(first, last + 1)
    ]
    assert {line.endswith("requests") for line in states if ": 1 " in line} == {False}

    def rebuilt(config: Any, hooks: Hooks) -> Built:
        return Built(new_engine(llm, parts=hooks.parts), None, {}, llm.spec, llm._model)

    monkeypatch.setattr(replaying, "build_engine", rebuilt)
    monkeypatch.setattr(llm._engine.runner, "close", lambda: None)
    steps = sum(record["event"] == "plan" and record["step"] <= 9 for record in records)
    printed = out(str(crowd), "--until", "9")
    assert (
        printed.startswith(f"{steps} steps, ")
        and "identical\nAfter step 9: 7 requests\n" in printed
    )
    assert out(str(crowd), "--state", "--until", "9") == printed.partition("identical\n")[2]
    shown = tmp_path / "shown.jsonl"
    assert out(str(crowd), "--snapshots", str(shown), "--until", "9") == printed
    header, before, *snapshots = records_of(shown)
    assert header["event"] == "snapshots" and before["step"] is None
    assert [snapshot["step"]["step"] for snapshot in snapshots] == list(range(first, 10))
    assert stat.S_IMODE(shown.stat().st_mode) == 0o600
    assert run("replay", str(crowd), "--snapshots", str(shown)) == 2
    assert "shown.jsonl exists" in capsys.readouterr().err


def test_snapshots_never_overwrite_a_file(tmp_path):
    shown = tmp_path / "shown.jsonl"
    shown.write_text("mine")
    with pytest.raises(ConfigError, match="shown.jsonl exists"):
        write_snapshots(shown, tmp_path / "run.jsonl")
    assert shown.read_text() == "mine"


def check_shown(llm: LLM, failed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the snapshots of an incident end with the step that failed, whether it can be run
    again or not.
    """

    def rebuilt(config: Any, hooks: Hooks) -> Built:
        return Built(new_engine(llm, parts=hooks.parts), None, {}, llm.spec, llm._model)

    shown = failed.with_name("shown")
    with monkeypatch.context() as patch:
        patch.setattr(replaying, "build_engine", rebuilt)
        patch.setattr(llm._engine.runner, "close", lambda: None)
        assert run("replay", str(failed), "--snapshots", str(shown)) == 0
    header, *_, last = records_of(shown)
    shown.unlink()
    assert header["incident"]["reason"] == "a step failed"
    assert "no_such_thing" in last["step"]["error"] and "results" not in last["step"]
    assert last["requests"][0]["reasons"] == ["error"] and not any(last["pool"]["ref_counts"])


def test_texts_stand_beside_token_ids_where_the_tokenizer_of_the_log_is_here(
    crowd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The library that reads the tokenizer's file spells them.

    No log has a text unless it is asked for.
    """
    text_of = Tokenizer.from_file(str(DEMO / "tokenizer.json")).decode
    head, *records = records_of(crowd)
    assert (
        run("replay", str(crowd), "--texts", str(tmp_path / "none")) == 2
        and not (tmp_path / "none").exists()
    )
    assert "the tokenizer of the log is not on this machine" in capsys.readouterr().err
    named = tmp_path / "named.jsonl"
    named.write_text(
        "".join(
            f"{json.dumps(record)}\n" for record in [head | {"config": {"model": "demo"}}, *records]
        )
    )
    results = [record for record in records if record["event"] == "result"]
    drawn = {token for record in results for token in record["tokens"] if token >= 0}
    candidates = {
        token for record in results for _, _, ids, _ in record.get("logprobs", ()) for token in ids
    }
    for index, words in enumerate(([str(crowd), "--model", "demo"], [str(named)])):
        assert run("replay", *words, "--request", "request-1") == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if "drew [" in line]
        for line in lines:
            ids, _, texts = line.rpartition("drew [")[2].partition("] ")
            assert texts.startswith(
                " ".join(repr(text_of([int(token_id)])) for token_id in ids.split(", "))
            )
        copied = tmp_path / f"{index}.jsonl"
        assert run("replay", *words, "--texts", str(copied)) == 0
        header, *others = records_of(copied)
        assert others == records and stat.S_IMODE(copied.stat().st_mode) == 0o600 and len(lines) > 3
        assert (
            header["texts"] == {str(token): text_of([token]) for token in drawn | candidates}
            and "texts" not in head
        )
    named.write_text("".join(f"{json.dumps(scrub(record))}\n" for record in records_of(named)))
    assert run("replay", str(named), "--texts", str(tmp_path / "none"), "--until", "3") == 0
    header, *others = records_of(tmp_path / "none")
    assert (
        header["texts"] == {}
        and 0 < max(record["step"] for record in others if record["event"] == "plan") <= 3
    )


def test_a_server_writes_its_last_steps(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes them on request, and after a step that failed.

    As long as nothing has fallen out of the ring they can be run again.
    """
    requested = {
        "model": "demo",
        "prompt": prompts_of(20)[0],
        "temperature": 0,
        "max_tokens": 5,
        "ignore_eos": True,
    }
    runner = llm._engine.runner

    def files() -> list[Path]:
        return sorted(tmp_path.glob("incident-*.jsonl"), key=lambda path: path.stat().st_mtime_ns)

    for keeps in (True, False):
        engine = new_engine(llm)
        settings = {
            "served_model_name": "demo",
            "incident_steps": 7,
            "incident_directory": str(tmp_path),
            "incident_token_ids": keeps,
        }
        with serving(
            Built(engine, None, {}, llm.spec, llm._model), engine=llm.config, **settings
        ) as server:
            with httpx.Client(base_url=server.address, timeout=60) as client:
                assert client.post("/v1/completions", json=requested).status_code == 200
                answer = client.post("/debug/incident").json()
                path = tmp_path / answer["file"]
                assert stat.S_IMODE(path.stat().st_mode) == 0o600 and answer["num_steps"] == 5
                assert (
                    client.post("/debug/incident", headers={"Origin": "http://x"}).status_code
                    == 403
                )
                with monkeypatch.context() as planted:
                    planted.setattr(runner, "run", lambda batch: runner.no_such_thing)
                    assert client.post("/v1/completions", json=requested).status_code == 500
                wait_until(lambda: len(files()) == 2, "it is written")
                wait_until(lambda: files()[-1].stat().st_size > 0)
                failed = files()[-1]
                time.sleep(0.2)
                events = [record["event"] for record in records_of(failed)]
                assert (
                    "failure" in events
                    and records_of(failed)[0]["incident"]["reason"] == "a step failed"
                )
                check_shown(llm, failed, monkeypatch)
                if keeps:
                    for log in (path, failed):
                        assert replay_log(llm, log).difference is None
                    assert replay_log(llm, path).num_steps == 5
                assert client.post("/v1/completions", json=requested).status_code == 200
                late = tmp_path / client.post("/debug/incident").json()["file"]
            server.errors.clear()
        for log in (late,) if keeps else (path, failed, late):
            with pytest.raises(
                EventLogError,
                match="cannot be run again: (it does not begin|token ids were left out)",
            ):
                replaying.replay(log)
        assert run("replay", str(late), "--state") == 0
        for log in files():
            log.unlink()
    with serving(Built(new_engine(llm), None, {}, llm.spec, llm._model)) as server:
        assert httpx.post(f"{server.address}/debug/incident").status_code == 404
