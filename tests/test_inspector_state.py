"""The page is shown what the engine's own tables say, and looking changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from jaxpage import LLM, SamplingParams
from jaxpage.engine.engine import Engine
from jaxpage.errors import ShuttingDown
from jaxpage.replay.recorder import Recorder
from jaxpage.serving.inspector import routes as page
from jaxpage.serving.inspector import watching
from jaxpage.serving.inspector.pacing import Pace
from jaxpage.serving.inspector.state import Inspector
from jaxpage.serving.inspector.watching import Timeline, Watcher
from jaxpage.step.events import Events
from tests.support.engines import LLAMA, make_llm
from tests.support.inspecting import POOL, run_crowd
from tests.support.random_checkpoints import random_checkpoint
from tests.support.sweeps import few

LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = random_checkpoint(tmp_path_factory.mktemp("model"), LLAMA)
    with make_llm(directory, **POOL, preemption_mode="auto", swap_space_blocks=24) as llm:
        yield llm


@pytest.fixture
def engine(llm: LLM) -> Iterator[Engine]:
    yield llm._engine
    llm._engine.abort_all()
    llm._engine.reset_prefix_cache()
    llm._engine.events = Events()


def check_against_tables(snapshot: dict[str, Any], engine: Engine) -> None:
    scheduler, manager, pool = (
        engine.scheduler,
        engine.scheduler.block_manager,
        engine.scheduler.block_manager.groups[0].pool,
    )
    shown = snapshot["pool"]
    assert shown["ref_counts"] == [pool.ref_count(block) for block in range(pool.num_blocks)]
    assert set(shown["kept"]) == set(manager.cached.index._entries)
    tables = {
        each["id"]: list(each["blocks"])
        for request in snapshot["requests"]
        for each in request["sequences"]
        if each["blocks"]
    }
    assert tables == {
        each: list(manager.block_tables(each)[0]) for each in manager.sequence_ids if each >= 0
    }
    counted = Counter(block for table in tables.values() for block in table)
    assert all(shown["ref_counts"][block] == counted[block] for block in range(1, pool.num_blocks))
    host = {
        each["id"]: each["host_blocks"]
        for request in snapshot["requests"]
        for each in request["sequences"]
        if each["host_blocks"]
    }
    assert host == manager.groups[0].swapped._tables
    for state, groups in (
        ("running", scheduler.running),
        ("waiting preempted swapped", scheduler.waiting),
    ):
        ids = [
            request["id"] for request in snapshot["requests"] if request["state"] in state.split()
        ]
        assert ids == [group.request.request_id for group in groups]


def check_against_stats(snapshot: dict[str, Any], stats: dict[str, Any]) -> None:
    counts, cached = snapshot["pool"]["ref_counts"], set(snapshot["pool"]["kept"])
    free = [block for block, count in enumerate(counts) if count == 0 and block != 0]
    states = Counter(request["state"] for request in snapshot["requests"])
    assert snapshot["pool"]["num_blocks"] - 1 == stats["num_blocks_total"]
    assert len(free) == stats["num_blocks_free"]
    assert len(cached & set(free)) == stats["num_blocks_cached"]
    assert sum(count > 1 for count in counts) == stats["shared_blocks"]
    assert states["running"] == stats["num_requests_running"]
    assert states["swapped"] == stats["num_requests_swapped"]
    assert (
        states["waiting"] + states["preempted"] + states["swapped"] == stats["num_requests_waiting"]
    )
    assert snapshot["num_steps"] == stats["engine_steps_total"]


@pytest.mark.parametrize("seed", few([5, 8, 10], [8]))
def test_a_snapshot_is_what_the_tables_say(engine: Engine, seed: int) -> None:
    inspector, seen = Inspector(), Counter[str]()

    def after_step() -> None:
        snapshot = json.loads(json.dumps(inspector.inspect(engine)))
        check_against_tables(snapshot, engine)
        check_against_stats(snapshot, engine.stats())
        assert snapshot["compiles"]["total"] == engine.runner.executables.num_found_of_all[1]
        for request in snapshot["requests"]:
            seen[request["state"]] += 1
            check_timeline(request, snapshot)

    run_crowd(engine, seed, after_step)
    assert all(seen[state] for state in ("running", "waiting", "preempted", "swapped", "finished"))


def check_timeline(request: dict[str, Any], snapshot: dict[str, Any]) -> None:
    line, now = request["timeline"], snapshot["clock"]["now"]
    assert line[0][0] == "queued"
    moments = [
        moment for _, start, end, _ in line for moment in (start, now if end is None else end)
    ]
    assert moments == sorted(moments)
    assert all(end is not None for _, _, end, _ in line[:-1])
    assert sum(kind in ("preempted", "swapped") for kind, *_ in line) == request["num_preemptions"]
    is_open, waits = line[-1][2] is None, request["state"] in ("waiting", "preempted", "swapped")
    in_step = snapshot["step"] is not None and request["number"] in {
        row[0] for row in snapshot["step"]["rows"]
    }
    assert is_open or not waits
    assert not is_open or waits or (request["state"] == "running" and not in_step), (
        "admitted, and no row yet"
    )


def test_the_last_step_is_the_one_that_ran(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    inspector, built, kinds = Inspector(), [], Counter[str]()
    inspector.inspect(engine)
    build = engine.builder.build
    monkeypatch.setattr(
        engine.builder,
        "build",
        lambda plan, *others: built.append((plan, build(plan, *others))) or built[-1][1],
    )

    def after_step() -> None:
        step = inspector.inspect(engine)["step"]
        plan, batch = built[-1]
        assert (step["step"], step["bucket"][0], step["bucket"][1]) == (
            plan.step_id,
            batch.bucket.num_tokens,
            batch.bucket.num_rows,
        )
        assert [(row[1], row[2], row[3]) for row in step["rows"]] == [
            (r.sequence_id, r.start, len(r.token_ids)) for r in plan.rows
        ]
        assert (step["copies"], step["swap_out"], step["swap_in"]) == (
            plan.copies,
            plan.swap_out,
            plan.swap_in,
        )
        assert len(step["preempted"]) == len(plan.preempted)
        kinds.update(
            [step["kind"], *(name for name in ("copies", "swap_out", "preempted") if step[name])]
        )

    run_crowd(engine, 4, after_step)
    assert all(kinds[name] for name in ("chunk", "decode", "copies", "swap_out", "preempted"))


def test_prompts_are_shown_only_where_they_may_be(engine: Engine) -> None:
    engine.add("told", engine.prepare("a secret", [101, 102, 103, 104, 105], LONG))
    engine.add("ids", engine.prepare(None, [201, 202, 203, 204, 205], LONG))
    engine.step()
    hidden, shown = (
        json.dumps(Inspector().inspect(engine)),
        json.dumps(Inspector(show_prompts=True).inspect(engine)),
    )
    assert "secret" not in hidden and "103, 104" not in hidden and "203, 204" not in hidden
    assert "a secret" in shown and "201, 202, 203, 204, 205" in shown


def test_looking_changes_nothing_for_who_listens(engine: Engine) -> None:
    def records(inspector: Inspector | None) -> list[Any]:
        events: list[Any] = []
        engine.events = Recorder(events.append)
        first = engine.scheduler._num_steps, engine._num_sequences
        run_crowd(engine, 5, lambda: inspector and inspector.inspect(engine), num_requests=5)
        engine.reset_prefix_cache()
        assert first[0] < engine.scheduler._num_steps
        return [(each["event"], len(json.dumps(each.get("edits", [])))) for each in events]

    engine.reset_prefix_cache()
    alone = records(None)
    assert Counter(event for event, _ in records(Inspector())) == Counter(
        event for event, _ in alone
    )


def test_nobody_listens_when_nobody_looks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    inspector, before = Inspector(), engine.events
    engine.add("one", engine.prepare(None, [1, 2, 3], LONG))
    engine.step()
    assert engine.events is before
    assert inspector.inspect(engine)["step"] is None  # nothing was noted before the first look
    assert isinstance(engine.events, Watcher)
    engine.step()
    assert engine.events is not before
    monkeypatch.setattr(watching, "PATIENCE_SECONDS", -1.0)
    engine.step()
    assert engine.events is before
    engine.step()
    monkeypatch.undo()
    again = inspector.inspect(engine)
    assert again["step"] is None and [each["id"] for each in again["requests"]] == ["one"]


def test_a_broken_history_harms_no_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    Inspector().inspect(engine)
    monkeypatch.setattr(Watcher, "_note", fail)
    reporter = engine.add("one", engine.prepare(None, [1, 2, 3], LONG))
    with caplog.at_level(logging.ERROR):
        while engine.has_unfinished:
            engine.step()
    assert reporter.whole().outputs[0].finish_reason == "length"
    assert type(engine.events) is Events and "history" in caplog.text


def test_a_timeline_is_bounded() -> None:
    line = Timeline()
    for step in range(1, 5000, 2):  # never one after the other
        line.compute("decode", step, step + 1, 1, step)
    assert len(line.segments) == watching.MAX_SEGMENTS
    assert sum(tokens for *_, tokens in line.segments) == 2500 and line.segments[-1][2] == 5000


class Source:
    """A driver as the routes see it."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.ready, self.num_snapshots, self.before_step = engine, True, 0, None

    async def snapshot(self, function: Any, /) -> Any:
        self.num_snapshots += 1
        return function(self.engine)


def test_many_viewers_cost_one_snapshot(engine: Engine) -> None:
    source = Source(engine)

    async def look() -> None:
        feed = page._Feed(source, Inspector())
        await asyncio.gather(*(feed.latest() for _ in range(50)))
        assert source.num_snapshots == 1
        version, _ = await feed.latest()
        feed._due = 0.0
        assert (await feed.latest())[0] == version, "nothing has changed"
        engine.add("one", engine.prepare(None, [1, 2, 3], LONG))
        feed._due = 0.0
        assert (await feed.latest())[0] == version + 1

    asyncio.run(look())


def test_a_stream_ends_with_the_server(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(engine)

    async def read(feed: page._Feed) -> list[bytes]:
        frames = []
        async for frame in feed.events():
            frames.append(frame)
            assert feed.num_viewers == 1
            source.ready = False
        return frames

    async def raise_shutdown(function: Any) -> None:
        raise ShuttingDown("the engine was shut down")

    feed = page._Feed(source, Inspector())
    (frame,) = asyncio.run(read(feed))
    assert json.loads(frame.removeprefix(b"data: "))["pool"]["num_blocks"] == POOL["num_blocks"]
    source.ready = True
    monkeypatch.setattr(source, "snapshot", raise_shutdown)
    feed = page._Feed(source, Inspector())
    assert asyncio.run(read(feed)) == [] and feed.num_viewers == 0


def test_the_files_of_the_page(engine: Engine) -> None:
    client = TestClient(
        Starlette(routes=page.routes(Source(engine), show_prompts=False)),
        raise_server_exceptions=False,
    )
    assert client.get("/ui", follow_redirects=False).headers["location"] == "ui/"
    for path in page.PAGE_PATHS - {"/ui"}:
        answer = client.get(path)
        assert (
            answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
        ), path
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
    for path in (
        "/ui/none.js",
        "/ui/../state.py",
        "/ui/%2e%2e/state.py",
        "/ui//etc/passwd",
        "/ui/static/main.js",
    ):
        assert client.get(path).status_code == 404, path
    assert client.post("/debug/state").status_code == 405
    state = client.get("/debug/state")
    assert state.headers["cache-control"] == "no-store" and state.json()["pool"]["block_size"] == 16


def test_the_page_is_small_and_plain() -> None:
    files = {path.name: path.read_text() for path in Path(page.__file__).parent.glob("static/*")}
    scripts = [text for name, text in files.items() if name.endswith(".js")]
    assert sum(text.count("\n") for text in scripts) < 3950
    assert not [name for name, text in files.items() if text.count("\n") > 400]
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "localStorage",
        "cookie",
    ):
        assert not [name for name, text in files.items() if word in text], word
    assert not [
        name
        for name, text in files.items()
        if "http://" in text.replace("http://www.w3.org/", "") or "https://" in text
    ]


def test_no_more_viewers_than_there_may_be(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_VIEWERS", 0)
    client = TestClient(Starlette(routes=page.state_routes(Source(engine), show_prompts=False)))
    with pytest.raises(Exception, match="viewers already") as refusal:
        client.get("/debug/events")
    assert SimpleNamespace(**vars(refusal.value)).status == 503


@pytest.mark.parametrize(
    ("requested", "can_be_slow", "status"),
    [(0.5, False, 403), (9, True, 400), ("1", True, 400), (-1, True, 400), (True, True, 400)],
)
def test_slow_motion_is_for_who_is_alone(
    engine: Engine, requested: Any, can_be_slow: bool, status: int
) -> None:
    source = Source(engine)
    source.ready = False  # a stream that begins ends at once
    client = TestClient(
        Starlette(routes=page.state_routes(source, show_prompts=False, can_be_slow=can_be_slow))
    )
    with pytest.raises(Exception, match="seconds_per_step|Slow motion") as refusal:
        client.post("/debug/events", json={"seconds_per_step": requested})
    assert SimpleNamespace(**vars(refusal.value)).status == status
    with pytest.raises(Exception, match="in the body of a POST"):
        client.get("/debug/events?seconds_per_step=0.5")
    with pytest.raises(Exception, match="application/json"):
        client.post(
            "/debug/events",
            content=b'{"seconds_per_step": 0.5}',
            headers={"content-type": "text/plain"},
        )
    for name, value in (
        ("sec-fetch-site", "cross-site"),
        ("referer", "http://evil.example/"),
        ("origin", "null"),
    ):
        with pytest.raises(Exception, match="only accepts requests with"):
            client.post("/debug/events", json={"seconds_per_step": 0.5}, headers={name: value})


def test_of_several_paces_the_slowest_counts() -> None:
    pace, orders = Pace(), list[int]()

    def has_orders() -> bool:
        return bool(orders)

    with pace.hold(60.0), contextlib.suppress(RuntimeError):
        with pace.hold(0.5):
            assert pace.seconds == 60.0
        assert pace.lets_step(has_orders), "the first step waits for none"
        orders.append(1)
        assert not pace.lets_step(has_orders), "whoever asks something is heard meanwhile"
        raise RuntimeError
    assert pace.seconds == 0.0 and pace.lets_step(has_orders)
