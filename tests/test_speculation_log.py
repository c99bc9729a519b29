"""Event logs of engines that speculate: drafts are in the log, so that a replay needs nobody who
makes them.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage import LLM, SamplingParams
from jaxpage.decoding import SamplingStrategy
from jaxpage.device.inputs.step_inputs import TableShape, views
from jaxpage.engine.engine import Engine
from jaxpage.errors import EventLogError
from jaxpage.replay import replaying
from jaxpage.replay.event_log import EventLog
from jaxpage.replay.log_header import config_hash
from jaxpage.replay.recorder import Recorder
from jaxpage.replay.replaying import Report
from jaxpage.shapes import NOTHING_ALLOWED
from jaxpage.speculation import ProposingSpeculator
from jaxpage.step.draft import Drafts
from jaxpage.step.edits import Append, Finish
from jaxpage.step.plan import Row, Sample, StepPlan, StepResult
from jaxpage.step.report import StepReport
from tests.support.engines import LLAMA, make_llm
from tests.support.random_checkpoints import random_checkpoint
from tests.support.scripted import DRAFTING, Guesses, Scripted, draft_with, mixed_up, without_drafts
from tests.support.sweeps import examples
from tests.test_event_log import (
    ACTIONS,
    HEADER,
    POOL,
    Letters,
    Probabilities,
    act,
    find,
    flip,
    leaves,
    new_engine,
    open_log,
    prompts_of,
    records_of,
    replay_log,
    step_of,
    write,
)

pytestmark = pytest.mark.usefixtures("compiled_when_used", "largest_shapes", "usual_pages")

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("model"), LLAMA)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with make_llm(directory, speculative_config=DRAFTING, **POOL) as llm:
        llm.untouched = copy.deepcopy(llm._engine.scheduler)
        yield llm


def crowd_of(llm: LLM) -> tuple[list[list[int]], list[SamplingParams]]:
    """Returns more requests than the pool holds, with parameters that look at what stands before a
    draw.
    """
    params = [
        SamplingParams(temperature=0.9, top_p=0.9, max_tokens=30, ignore_eos=True, logprobs=2),
        SamplingParams(
            temperature=1.0, seed=8, max_tokens=30, min_tokens=4, repetition_penalty=1.2
        ),
        dataclasses.replace(GREEDY, max_tokens=40, prompt_logprobs=1),
        SamplingParams(
            temperature=0.7,
            seed=2,
            max_tokens=25,
            ignore_eos=True,
            stop_token_ids=list(range(9, 20)),
        ),
        SamplingParams(temperature=1.2, max_tokens=35, ignore_eos=True, presence_penalty=0.5),
    ]
    return prompts_of(40, 61, 9, 33, 70), params


def texts_of(outputs: list[Any], first_id: int = 0) -> dict[int, list[int]]:
    """Returns texts by sequence id, of requests of one sequence each."""
    return {
        first_id + index: [*output.prompt_token_ids, *output.outputs[0].token_ids]
        for index, output in enumerate(outputs)
    }


def run_twice(llm: LLM, path: Path, prompts: Any, params: Any, tokenizer: Any = None) -> list[Any]:
    """Runs without drafts, and then logged with drafts of which many are right.

    Both give the same.
    """
    with open_log(llm, path.with_suffix(".plain"), tokenizer):
        without_drafts(llm)
        plain = llm.generate(prompts, params, use_tqdm=False)
    with open_log(llm, path, tokenizer) as engine:
        draft_with(engine, Scripted(texts_of(plain), mixed_up))
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs for output in outputs] == [output.outputs for output in plain]
    return outputs


@pytest.fixture(scope="module")
def crowd(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logs") / "crowd.jsonl"
    run_twice(llm, path, *crowd_of(llm))
    return path


def results_of(path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns plans and their results."""
    records = records_of(path)
    pairs = itertools.pairwise(records)
    return [
        (plan, result)
        for plan, result in pairs
        if (plan["event"], result["event"]) == ("plan", "result")
    ]


def assert_identical(report: Report, path: Path) -> None:
    results = results_of(path)
    num_tokens = sum(
        sum(1 + len(right) for right in result["paths"])
        if "paths" in result
        else len(result["tokens"])
        for _, result in results
    )
    assert report == Report(len(results), num_tokens, None, None)
    assert any("drafts" in plan for plan, _ in results), "nothing was drafted"


# ---- runs that are the same again


def test_a_crowd(llm: LLM, crowd: Path) -> None:
    assert_identical(replay_log(llm, crowd), crowd)
    records = records_of(crowd)
    assert any(record.get("preempted") for record in records), "the pool was too large"


def test_a_log_tells_what_was_drafted_and_what_was_right(llm: LLM, crowd: Path) -> None:
    """Text, put together from draws and paths alone, is what users saw."""
    tokens: dict[int, list[int]] = {}
    texts: dict[int, list[int]] = {}
    for record in records_of(crowd):
        if record["event"] == "arrival":
            texts[record["sequences"][0]] = list(record["prompt_token_ids"])
    num_right = num_wrong = 0
    for plan, result in results_of(crowd):
        if "drafts" not in plan:
            drawn_from = plan.get("draws", range(len(plan["rows"])))
            for row, token_id in zip(drawn_from, result["tokens"], strict=True):
                tokens.setdefault(plan["rows"][row][0], []).append(token_id)
            continue
        assert "draws" not in plan, "each token is drawn from"
        # chains: without parents
        drafts = {sequence: token_ids for sequence, token_ids in plan["drafts"]}
        cut = {edit[1]: edit[4] for edit in result.get("edits", []) if len(edit) == 5}
        first = 0
        for (sequence, start, length), right in zip(plan["rows"], result["paths"], strict=True):
            known = len(texts[sequence]) + len(tokens[sequence])
            assert start == known - 1 and length == 1 + len(drafts.get(sequence, []))
            assert right == list(range(1, 1 + len(right)))
            drawn = [result["tokens"][first + place] for place in (0, *right)]
            assert drafts.get(sequence, [])[: len(right)] == drawn[:-1]
            tokens[sequence] += drawn[: cut.get(sequence)]
            num_right += len(right)
            num_wrong += length - 1 - len(right)
            first += length
        assert first == len(result["tokens"])
    assert num_right > 20 and num_wrong > 20
    with open_log(llm, crowd.with_suffix(".again")):
        without_drafts(llm)
        outputs = llm.generate(*crowd_of(llm), use_tqdm=False)
    assert texts_of(outputs) == {
        sequence: [*texts[sequence], *tokens[sequence]] for sequence in texts
    }


def test_a_stop_string_inside_a_run_of_right_drafts(llm: LLM, tmp_path: Path) -> None:
    """The log says after how many of the step's tokens; the replay, which has no text, ends there
    too.
    """
    path = tmp_path / "a.jsonl"
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=40, ignore_eos=True)
    prompts = prompts_of(20, 40, 31, 5)
    with open_log(llm, tmp_path / "plain.jsonl", Letters()):
        without_drafts(llm)
        plain = llm.generate(prompts, params, use_tqdm=False)
    texts = texts_of(plain)
    stopped = dataclasses.replace(params, stop=["ab", "q", "zz"])
    with open_log(llm, path, Letters()) as engine:
        draft_with(engine, Scripted(texts, lambda *_: (4, 0)))
        outputs = llm.generate(prompts, stopped, use_tqdm=False)
    assert "stop" in {output.outputs[0].finish_reason for output in outputs}
    for index, output in enumerate(outputs):
        actual = output.outputs[0].token_ids
        assert actual == plain[index].outputs[0].token_ids[: len(actual)]
    ends = [
        edit
        for record in records_of(path)
        for edit in record.get("edits", [])
        if edit[0] == "finish"
    ]
    assert any(len(edit) == 5 for edit in ends), "no end came before the last of a step's tokens"
    assert_identical(replay_log(llm, path), path)

    records = records_of(path)
    place = next(
        i
        for i, record in enumerate(records)
        if any(len(edit) == 5 for edit in record.get("edits", []))
    )
    (edit,) = [edit for edit in records[place]["edits"] if len(edit) == 5]
    edit[4] = 9  # after more than there were
    tampered = replay_log(llm, write(tmp_path / "b.jsonl", records))
    assert step_of(tampered) == records[place]["step"] and "edits" in (tampered.difference or "")


def test_an_error_on_the_way_to_text_takes_the_run_with_it(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    prompts = prompts_of(20, 40, 9)
    with open_log(llm, tmp_path / "plain.jsonl"):
        without_drafts(llm)
        plain = llm.generate(prompts, GREEDY, use_tqdm=False)
    with open_log(llm, path) as engine, monkeypatch.context() as patch:
        draft_with(engine, Scripted(texts_of(plain), lambda *_: (3, 1)))
        real, calls = SamplingStrategy._advance, itertools.count()

        def failing(self: Any, draw: Any) -> Any:
            if draw.drafted and next(calls) == 10:
                raise KeyError("planted")
            return real(self, draw)

        patch.setattr(SamplingStrategy, "_advance", failing)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs].count("error") == 1
    (end,) = [
        edit
        for r in records_of(path)
        for edit in r.get("edits", [])
        if edit[:1] == ["finish"] and len(edit) == 5
    ]
    assert end[2:] == ["error", "KeyError: 'planted'", 0]
    assert_identical(replay_log(llm, path), path)


def test_a_draw_of_nothing_after_a_right_draft(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the request after the tokens before it; no text decides that, and the replay comes to
    it by itself.
    """
    path = tmp_path / "a.jsonl"
    prompts = prompts_of(20, 40)
    with open_log(llm, tmp_path / "plain.jsonl"):
        without_drafts(llm)
        plain = llm.generate(prompts, GREEDY, use_tqdm=False)
    real = llm._engine.runner.run
    victim = plain[0].outputs[0].token_ids

    def barren(batch: Any) -> StepResult:
        """Forbids every token after the sixth one of the first request: the last draw of a step
        with two right drafts.
        """
        result = real(batch)
        fields: dict[str, Any] = views(batch.packed, batch.bucket, llm._engine.builder.tables)
        positions, ids = fields["positions_T"], fields["token_ids_T"]
        at = [
            (p, t) == (20 + 5, victim[5])
            for p, t in zip(
                positions[fields["drawn_token_R"]], ids[fields["drawn_token_R"]], strict=True
            )
        ]
        barred = np.array(at[: len(result.token_ids)], bool)
        return dataclasses.replace(
            result, token_ids=np.where(barred, NOTHING_ALLOWED, result.token_ids)
        )

    monkeypatch.setattr(llm._engine.runner, "run", barren)
    with open_log(llm, path) as engine:
        draft_with(engine, Scripted(texts_of(plain), lambda sequence, known: (2, 0)))
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert (
        outputs[0].outputs[0].finish_reason == "error"
        and outputs[0].outputs[0].token_ids == victim[:6]
    )
    assert outputs[1].outputs[0].token_ids == plain[1].outputs[0].token_ids
    ends = [
        edit
        for record in records_of(path)
        for edit in record.get("edits", [])
        if edit[2] == "error"
    ]
    assert len(ends) == 1 and ends[0][4:] == [2]
    assert_identical(replay_log(llm, path), path)


def test_the_command_needs_no_proposer(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log of prompt lookup is replayed, also where its settings say that lookup went otherwise; a
    controller is never asked.
    """
    path = tmp_path / "a.jsonl"
    with make_llm(directory, speculative_config=DRAFTING, event_log=str(path), **POOL) as llm:
        llm.generate(
            prompts_of(30, 12, 50), dataclasses.replace(GREEDY, max_tokens=60), use_tqdm=False
        )
    records = records_of(path)

    def never(*_: Any) -> Any:
        raise AssertionError("a replay drafts nothing of its own")

    monkeypatch.setattr(ProposingSpeculator, "propose", never)
    monkeypatch.setattr(ProposingSpeculator, "observe", never)
    records[0]["config"]["speculative_config"] |= {"prompt_lookup_max": 9}
    records[0]["config_hash"] = config_hash(records[0]["config"])
    assert_identical(replaying.replay(write(tmp_path / "b.jsonl", records), progress=False), path)

    records[0]["config"]["speculative_config"] |= {"num_speculative_tokens": 3}
    records[0]["config_hash"] = config_hash(records[0]["config"])
    with pytest.raises(EventLogError, match=r"(?s)limits is .*'verified': \[\[4, 4\]\]"):
        replaying.replay(write(tmp_path / "c.jsonl", records), progress=False)


# ---- what is in a log


def test_everything_of_drafts_is_recorded() -> None:
    records: list[dict[str, Any]] = []
    recorder = Recorder(records.append)
    rows = (
        Row(4, 30, (7, 1, 2, 3), ((3,),), parents=(0, 0, 2)),
        Row(5, 8, (9,), ((2,),)),
        Row(6, 2, (5, 6, 7), ((1,),), parents=(0, 1)),
    )
    params = SamplingParams()
    draws = [
        (row, offset) for row, each in enumerate(rows) for offset in range(len(each.token_ids))
    ]
    samples = tuple(
        Sample(row, offset, rows[row].sequence_id, params, 0, 0, 0) for row, offset in draws
    )
    plan = StepPlan(12, rows, samples)
    recorder.planned(plan)
    token_ids = np.array([2, 11, 3, 4, 10, 6, 7, 8], np.int32)
    floats, tops = np.zeros(8, np.float32), np.zeros((8, 0))
    paths = np.array([[0, 2, 3, -1], [4, -1, -1, -1], [5, 6, 7, -1]], np.int32)
    result = StepResult(
        token_ids, floats, token_ids, tops.astype(np.int32), tops.astype(np.float32), paths=paths
    )
    appended = [Append(4, 2, drafted=True), Append(4, 3, drafted=True), Append(4, 4), Append(5, 10)]
    ended = [Append(6, 6, drafted=True), Finish(6, "stop", "x")]
    edits = [*appended, Finish(4, "length"), Finish(5, "length"), *ended]
    recorder.stepped(StepReport(Drafts(), plan, result, edits, []))
    assert json.loads(json.dumps(records)) == [
        {
            "event": "plan",
            "step": 12,
            "rows": [[4, 30, 4], [5, 8, 1], [6, 2, 3]],
            "drafts": [[4, [1, 2, 3], [-1, -1, 1]], [6, [6, 7]]],
            "tables": [[4, 1, [0, 3]], [5, 1, [0, 2]], [6, 1, [0, 1]]],
        },
        {
            "event": "result",
            "step": 12,
            "tokens": [2, 11, 3, 4, 10, 6, 7, 8],
            "edits": [
                ["finish", 4, "length", None],
                ["finish", 5, "length", None],
                ["finish", 6, "stop", "x", 1],
            ],
            "paths": [[2, 3], [], [1, 2]],
        },
    ]


# ---- what is changed in a log


def draft_row(record: dict[str, Any]) -> list[int]:
    sequence = record["drafts"][0][0]
    return next(row for row in record["rows"] if row[0] == sequence)


CHANGES: dict[str, tuple[str, str, int, Any, int]] = {  # the last: how many lines later it shows
    "a draft": ("plan", "drafts", 5, lambda record: flip(record["drafts"][0][1], 0), 1),
    "whose they are": ("plan", "drafts", 5, lambda record: flip(record["drafts"][0], 0), 0),
    "a draft less": ("plan", "drafts", 9, lambda record: record["drafts"][0][1].pop(), 0),
    "that there were any": ("plan", "drafts", 9, lambda record: record.pop("drafts"), 0),
    "parents of a chain": ("plan", "drafts", 3,
                           lambda record: record["drafts"][0].append(
                               [-1, 0, 1, 2][: len(record["drafts"][0][1])]), 0),
    "how long a row is": ("plan", "drafts", 3, lambda record: flip(draft_row(record), 2), 0),
    "a token": ("result", "paths", 9, lambda record: flip(record["tokens"], -1), 0),
    "a path": ("result", "paths", 9, lambda record: record["paths"][0].append(9), 0),
    "that there were paths": ("result", "paths", 4, lambda record: record.pop("paths"), 0),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_found(llm: LLM, crowd: Path, tmp_path: Path, what: str) -> None:
    event, has, nth, change, later = CHANGES[what]
    records = records_of(crowd)
    place = find(records, event, has, nth)
    change(records[place])
    report = replay_log(llm, write(tmp_path / "a.jsonl", records))
    assert step_of(report) == records[place]["step"]
    assert f"(line {place + 1 + later})" in (report.difference or ""), report.difference


NO_DRAFTS: tuple[Any, ...] = (
    *(
        7,
        [7],
        [[7]],
        [["a", [1]]],
        [[[], [1]]],
        [[0, 5]],
        [[0, ["a"]]],
        [[0, [1.0]]],
        [[0, [257]]],
        [[0, [-1]]],
    ),
    *([[0, [1, 2], [0, 0]]], [[0, [1, 2], [-1]]], [[0, [1, 2], [-1, -2]]], [[0, [1], [-1], 4]]),
)


@pytest.mark.parametrize("drafts", NO_DRAFTS, ids=str)
def test_drafts_that_are_none_are_refused(
    llm: LLM, crowd: Path, tmp_path: Path, drafts: Any
) -> None:
    records = records_of(crowd)
    place = find(records, "plan", "drafts", 2)
    records[place]["drafts"] = drafts
    with pytest.raises(EventLogError, match=f"line {place + 1}: these drafts are none: "):
        replay_log(llm, write(tmp_path / "a.jsonl", records))


# ---- every history


class Verifying(Probabilities):
    """Draws by chance, and often what was drafted.

    Which drafts were right is found token by token.
    """

    def __init__(self, tables: TableShape) -> None:
        self.tables = tables

    def run(self, batch: Any) -> StepResult:
        result = super().run(batch)
        if not batch.bucket.verifies:
            return result
        fields: dict[str, Any] = views(batch.packed, batch.bucket, self.tables)
        ids, parents, starts = (
            fields["token_ids_T"].tolist(),
            fields["parents_T"].tolist(),
            fields["query_start"],
        )
        drawn = result.token_ids.copy()
        for index in range(len(drawn)):
            children = [child for child, parent in enumerate(parents) if parent == index]
            if children and drawn[index] % 4:
                drawn[index] = ids[children[drawn[index] % len(children)]]
        paths = np.full((batch.num_rows, batch.bucket.max_query_len), -1, np.int32)
        for row, first in enumerate(starts[: batch.num_rows].tolist()):
            place, depth = first, 0
            while True:
                paths[row, depth] = place
                right = [
                    c
                    for c, parent in enumerate(parents)
                    if parent == place and ids[c] == drawn[place]
                ]
                if not right:
                    break
                place, depth = right[0], depth + 1
        return dataclasses.replace(result, token_ids=drawn, ranks=drawn, paths=paths)


def speculating(llm: LLM) -> Engine:
    engine = new_engine(llm, Verifying(llm._engine.builder.tables))
    draft_with(engine, Guesses())
    return engine


@examples(15)
@given(actions=ACTIONS, data=st.data())
def test_every_history_can_be_replayed_and_every_number_counts(
    llm: LLM, tmp_path_factory: pytest.TempPathFactory, actions: list[Any], data: st.DataObject
) -> None:
    logging.disable(logging.CRITICAL)
    try:
        path = tmp_path_factory.mktemp("history") / "a.jsonl"
        engine = speculating(llm)
        engine.events = log = EventLog(path, HEADER)
        act(engine, actions)
        log.closed()
        runner = Verifying(llm._engine.builder.tables)
        report = replay_log(llm, path, runner)
        assert report.difference is None and report.ending is None

        records = records_of(path)
        places = [
            (index, way)
            for index, (record, following) in enumerate(itertools.pairwise(records))
            for name in ("drafts", "paths")
            for way in leaves(record.get(name, []), (name,))
            # a step that was not run shows no token
            if following["event"] == "result" or name == "paths"
        ]
        if not places:
            return
        place, way = data.draw(st.sampled_from(places))
        target = records[place]
        for key in way[:-1]:
            target = target[key]
        target[way[-1]] += 1
        try:
            difference = replay_log(
                llm, write(path.with_name("b.jsonl"), records), runner
            ).difference
        except EventLogError as error:  # drafts that are none any more
            assert records[place]["event"] == "plan" and f"line {place + 1}:" in str(error)
            return
        assert difference is not None
        line = int(difference.partition("(line ")[2].partition(")")[0])
        assert line == place + 1 or (records[place]["event"] == "plan" and line == place + 2)
    finally:
        logging.disable(logging.NOTSET)
