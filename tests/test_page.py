"""The page in a browser: the playground against a whole server, the inspector live and over
recorded event logs.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from jaxpage.assembly import Built, Hooks, build_engine
from jaxpage.driver.async_driver import AsyncDriver
from jaxpage.engine.engine import Engine
from jaxpage.replay import replaying
from jaxpage.replay.incidents import IncidentRing
from jaxpage.replay.log_header import engine_header
from jaxpage.replay.log_walk import Walk
from jaxpage.replay.recorder import Recorder
from jaxpage.serving.inspector.pacing import Pace
from jaxpage.serving.inspector.recorded import write_snapshots
from jaxpage.serving.inspector.routes import page_routes
from jaxpage.serving.inspector.state import Inspector
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.step.events import Both
from tests.support.browsing import CHROMIUM, choose_log, launched, let_go, open_log, opened
from tests.support.engines import LLAMA, make_llm
from tests.support.executables import when_used
from tests.support.inspecting import POOL, run_crowd
from tests.support.random_checkpoints import random_checkpoint
from tests.support.running import wait_until
from tests.support.served import served, served_engine
from tests.support.sweeps import few
from tests.test_cache_groups import QWEN
from tests.test_several_models import serving

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
expect = playwright.expect
pytestmark = [
    pytest.mark.skipif(not CHROMIUM.exists(), reason="there is no /usr/bin/chromium"),
    pytest.mark.usefixtures("largest_shapes"),
]

KEY = "correct-horse"
YELLOW = Path(__file__).parents[1] / "examples" / "pictures" / "yellow.png"
INCIDENT_STEP, INCIDENT_STEPS = 150, 40


SIZES = {"max_num_batched_tokens": 64, "swap_space_blocks": 24, **POOL}
CONFIG = EngineConfig(model="demo", **SIZES)


@pytest.fixture(scope="module")
def demo_build() -> Built:
    with when_used():
        return build_engine(CONFIG)


class Crowd(NamedTuple):
    """A recorded crowd.

    Attributes:
        log: The event log.
        shown: The file of its snapshots.
        snapshots: What the engine showed while the log was recorded, by step.
        incident: An incident of some of the steps.
    """

    log: str
    shown: str
    snapshots: list[Any]
    incident: str


Directories = pytest.TempPathFactory


@pytest.fixture(scope="module")
def crowd(demo_build: Built, tmp_path_factory: Directories) -> Crowd:
    return crowd_of(demo_build.engine, demo_build.spec, CONFIG, tmp_path_factory.mktemp("crowd"))


@pytest.fixture(scope="module")
def crowd_of_several_steps(tmp_path_factory: Directories) -> Crowd:
    return crowd_of_model(LLAMA, tmp_path_factory, num_scheduler_steps=2)


@pytest.fixture(scope="module")
def crowd_of_groups(tmp_path_factory: Directories) -> Crowd:
    """Returns a crowd in which some layers see a window, so they have block tables of their own."""
    return crowd_of_model({**QWEN, "sliding_window": 24}, tmp_path_factory)


def crowd_of_model(config: Any, directories: Directories, **settings: Any) -> Crowd:
    directory = random_checkpoint(directories.mktemp("model"), config)
    sizes = {**SIZES, "preemption_mode": "auto", **settings}
    with make_llm(directory, **sizes) as llm:
        return crowd_of(llm._engine, llm.spec, llm.config, directories.mktemp("crowd"))


def crowd_of(engine: Engine, spec: Any, config: EngineConfig, directory: Path) -> Crowd:
    untouched = copy.deepcopy(engine.scheduler)
    # Without a look for some seconds, as on a busy machine, an inspector stops listening.
    inspector, snapshots = Inspector(clock=lambda: 0.0), []
    records = [json.loads(json.dumps(engine_header(config, engine, spec)))]
    ring = IncidentRing(INCIDENT_STEPS, keeps_token_ids=False)
    silent = engine.events
    engine.events = Both(Recorder(records.append), ring)
    inspector.inspect(engine)
    incident: list[Any] = []

    def after_step() -> None:
        snapshots.append(json.loads(json.dumps(inspector.inspect(engine))))
        if len(snapshots) == INCIDENT_STEP:
            taken = ring.read_ring("asked for")
            about = {"reason": taken.reason, "why_not_replayable": taken.why_not_replayable}
            incident.extend([{**records[0], "incident": about}, *taken.records])

    run_crowd(engine, 8, after_step)
    engine.events = silent
    engine.reset_prefix_cache()
    log = as_lines(records)

    def rebuilt(config: EngineConfig, hooks: Hooks) -> Built:
        """Returns the engine as it was at first; only what was compiled is shared."""
        again = Engine(
            scheduler=untouched,
            builder=engine.builder,
            runner=engine.runner,
            tokenizer=None,
            rules=engine.admission._rules._replace(seed=config.seed),
            parts=hooks.parts,
        )
        return Built(again, None, {}, spec, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replaying, "build_engine", rebuilt)
        patch.setattr(engine.runner, "close", lambda: None)
        return Crowd(log, snapshots_of(log, directory), snapshots, as_lines(incident))


def snapshots_of(log: str, directory: Path) -> str:
    """Returns the file that `jaxpage replay --snapshots` makes of a log."""
    (directory / "run.jsonl").write_text(log)
    report = write_snapshots(directory / "snapshots.jsonl", directory / "run.jsonl")
    assert report is None or (report.difference is None and report.num_steps > 100), report
    return (directory / "snapshots.jsonl").read_text()


def as_lines(records: list[Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture(scope="module")
def loop(demo_build: Built, crowd: Any) -> Iterator[AsyncDriver]:
    loop = AsyncDriver(demo_build)
    loop.start()
    yield loop
    assert loop.stop(60)


def pace_of(loop: AsyncDriver) -> Pace:
    """Returns the slow motion that the page has given to the driver."""
    assert loop.before_step is not None
    return loop.before_step.__self__  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def server(loop: AsyncDriver, demo_build: Built) -> Iterator[str]:
    with served_engine(loop, demo_build) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched(playwright) as browser:
        yield browser


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    with opened(browser) as page:
        yield page


def open_live(page: Any, server: str, kind: str = "Completion") -> None:
    page.goto(f"{server}/ui/")
    expect(page.locator("#status")).to_have_text("live")
    # of the first event, which comes a moment later
    expect(page.locator("#numbers")).to_contain_text("cached")
    for each in ("chat", "completion", kind.lower()):
        page.locator(f"[name=kind][value={each}]").check(force=True)
    page.locator(".parameters-box summary").click()


def note_posts(page: Any) -> list[Any]:
    """Returns a list that gets what the page sends from now on."""
    bodies: list[Any] = []
    page.on(
        "request",
        lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None,
    )
    return bodies


def free_blocks(page: Any) -> int:
    text = page.locator("#numbers").inner_text()
    counts = {name: int(number) for number, name in re.findall(r"(\d+) (in use|cached|free)", text)}
    return counts["cached"] + counts["free"]


def test_a_text_streams_while_its_blocks_fill(page: Any, server: str, loop: AsyncDriver) -> None:
    open_live(page, server)
    before = free_blocks(page)
    assert before == POOL["num_blocks"] - 1
    page.fill("#n", "2")
    page.fill("#max_tokens", "90")
    page.fill("#seed", "1")
    with pace_of(loop).hold(0.5):  # so that it still runs when a busy machine shows it
        page.click("#send")
        expect(page.locator(".state").first).to_have_text("running")
    with pace_of(loop).hold(0.02):
        expect(page.locator(".column")).to_have_count(2)
        expect(page.locator(".note")).to_have_text(
            re.compile(r"^180 tokens · [\d.]+ tokens/s · first after \d+ ms$")
        )
    first, second = (page.locator(".column .text").nth(index).inner_text() for index in range(2))
    assert len(first) > 100 and len(second) > 100 and first != second
    expect(page.locator(".state").first).to_have_text("finished")
    expect(page.locator("#numbers")).to_contain_text("0 in use")
    assert free_blocks(page) == before, "all blocks came back"


@pytest.mark.parametrize("shown", few(["used", "all"], ["used"]))
def test_the_status_is_never_lost_over_a_whole_request(
    page: Any, server: str, loop: AsyncDriver, shown: str
) -> None:
    """It stays whichever blocks are shown: those in use come and go, and what the page draws of
    them never ends its stream.
    """
    open_live(page, server)
    page.locator(f"#shown-{shown}").check(force=True)
    page.evaluate("""() => {
      window.told = [];
      const status = document.getElementById("status");
      new MutationObserver(() => window.told.push(status.dataset.kind)).observe(status, { attributes: true, childList: true });
    }""")
    streams: list[str] = []
    page.on(
        "request",
        lambda request: streams.append(request.url) if "/debug/events" in request.url else None,
    )
    page.fill("#max_tokens", "120")
    with pace_of(loop).hold(0.01):
        page.click("#send")
        expect(page.locator(".note")).to_contain_text("120 tokens")
    expect(page.locator("#numbers")).to_contain_text("0 in use")
    page.wait_for_timeout(500)
    assert set(page.evaluate("window.told")) == {"live"} and not streams


def rgb(color: str) -> str:
    return "rgb({}, {}, {})".format(*bytes.fromhex(color.strip().removeprefix("#")))


def test_a_server_that_dies_within_an_answer_leaves_a_page_that_can_send(page: Any) -> None:
    async def answer(request: Any) -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b'data: {"choices": [{"index": 0, "text": "There was"}]}\n\n'
            await asyncio.sleep(0.5)
            raise RuntimeError("killed")

        return StreamingResponse(parts(), media_type="text/event-stream")

    page.allowed += ["404", "ERR_INCOMPLETE_CHUNKED_ENCODING"]
    with served(
        Starlette(routes=[*page_routes(), Route("/v1/completions", answer, methods=["POST"])])
    ) as address:
        page.goto(f"{address}/ui/")
        page.locator("[name=kind][value=completion]").check(force=True)
        for number in (1, 2):
            page.fill("#prompt", "Once")
            page.click("#send")
            expect(page.locator(".exchange .note.problem")).to_have_count(number)
            expect(page.locator(".exchange .text").nth(number - 1)).to_contain_text("There was")
            expect(page.locator("#send")).to_be_enabled()
        note = page.locator(".exchange .note").first
        expect(note).to_contain_text("broke off")
        problem = page.evaluate("getComputedStyle(document.body).getPropertyValue('--problem')")
        assert note.evaluate("(one) => getComputedStyle(one).color") == rgb(problem)


def test_stop_ends_the_request_in_the_engine(page: Any, server: str, loop: AsyncDriver) -> None:
    open_live(page, server)
    num_steps = loop.engine.stats()["engine_steps_total"]
    first = page.locator(".requests button").first
    before = page.locator(".requests .name").all_inner_texts()[:1]
    page.fill("#max_tokens", "230")
    with pace_of(loop).hold(0.25):  # nearly a minute, if nobody stops it
        page.click("#send")
        expect(page.locator(".token").nth(3)).to_be_visible()
        expect(page.locator("#send")).to_be_disabled()
        page.click("#stop")
        expect(page.locator(".note")).to_contain_text("stopped")
        expect(page.locator("#send")).to_be_enabled()
    # no snapshot of a moment before
    expect(first).not_to_contain_text(before[0] if before else "none")
    expect(first).to_contain_text("finished")
    expect(page.locator("#numbers")).to_contain_text("0 in use")
    first.focus()
    expect(page.locator("#detail")).to_contain_text("ended: abort")
    assert loop.engine.stats()["engine_steps_total"] < num_steps + 100, (
        "the engine went on after the stop"
    )


def test_a_cell_for_every_block(page: Any, server: str) -> None:
    open_live(page, server)
    expect(page.locator("#grid")).to_have_attribute("data-cells", str(POOL["num_blocks"]))
    expect(page.locator("#host-numbers")).to_have_text("24 blocks, empty")
    expect(page.locator("#host-grid")).to_be_hidden()
    page.locator("#host summary").click()
    expect(page.locator("#host-grid")).to_have_attribute("data-cells", "24")
    page.locator("#grid").focus()
    page.keyboard.press("End")
    expect(page.locator("#detail")).to_contain_text(f"Block {POOL['num_blocks'] - 1} ")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#detail")).to_contain_text(f"Block {POOL['num_blocks'] - 1} ")
    page.keyboard.press("Home")
    expect(page.locator("#detail")).to_contain_text("Block 0 is the null block")


def test_the_probabilities_of_a_token(page: Any, server: str) -> None:
    open_live(page, server)
    page.fill("#max_tokens", "4")
    page.click("#send")
    expect(page.locator(".note")).to_contain_text("4 tokens")
    page.locator(".token").nth(1).hover()
    tip = page.locator("#tooltip")
    expect(tip.locator(".tip-row.chosen")).to_have_count(1)
    shares = [float(share) for share in re.findall(r"([\d.]+) %", tip.inner_text())]
    assert len(shares) >= 5 and shares == sorted(shares, reverse=True) and sum(shares) < 100.5
    page.locator(".text").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token").first).to_be_focused()


def test_beams_side_by_side(page: Any, server: str) -> None:
    open_live(page, server)
    page.select_option("#search", "beam")
    expect(page.locator("#temperature")).to_be_disabled()
    page.fill("#n", "3")
    page.fill("#max_tokens", "8")
    page.click("#send")
    expect(page.locator(".column h3")).to_have_text(["Beam 1", "Beam 2", "Beam 3"])
    expect(page.locator(".note")).to_contain_text("tokens/s")
    texts = [page.locator(".column .text").nth(index).inner_text() for index in range(3)]
    assert all(texts) and len(set(texts)) == 3


def squeeze(text: str) -> str:
    """Returns the text with white space as Markdown shows it."""
    return " ".join(text.split())


WITHOUT_POINTER = """
    const real = window.matchMedia.bind(window);
    window.matchMedia = (query) => (query.includes("pointer") ? { matches: false } : real(query));
"""


def test_a_chat_goes_on_from_top_to_bottom_and_after_a_reload(page: Any, server: str) -> None:
    page.add_init_script(WITHOUT_POINTER)
    open_live(page, server, "Chat")
    expect(page.locator("#start")).to_be_visible()
    bodies = note_posts(page)
    page.fill("#max_tokens", "40")
    page.fill("#system", "Be brief")
    for index, text in enumerate(("Once upon a time", "And then")):
        page.fill("#prompt", text)
        page.locator("#prompt").press("Enter")
        expect(page.locator("#prompt")).to_have_value("")
        expect(page.locator(".exchange").nth(index)).to_have_attribute("aria-busy", "false")
    said = [(each["role"], each["content"]) for each in bodies[1]["messages"]]
    assert (
        len(bodies) == 2
        and [role for role, _ in said] == ["system", "user", "assistant", "user"]
        and said[3][1] == "And then"
    )
    assert squeeze(said[2][1]) == squeeze(page.locator(".exchange .text").first.inner_text())
    shown = page.locator(".said").all_inner_texts()
    assert [squeeze(text) for text in shown] == [
        "system Be brief",
        "user Once upon a time",
        "user And then",
    ]
    tops = [page.locator(".exchange").nth(index).bounding_box()["y"] for index in range(2)]
    assert tops[0] < tops[1] < page.locator("#prompt").bounding_box()["y"], (
        "the newest is next to the input"
    )
    text = page.locator(".exchange .text").last
    assert text.evaluate("(one) => one.scrollHeight <= one.clientHeight + 1"), "at full height"
    texts = page.locator(".exchange").all_inner_texts()
    page.reload()
    expect(page.locator("#status")).to_have_text("live")
    assert page.locator(".exchange").all_inner_texts() == texts
    page.fill("#prompt", "Go on")
    page.locator("#prompt").press("Enter")
    expect(page.locator(".exchange").nth(2)).to_have_attribute("aria-busy", "false")
    assert [each["content"] for each in bodies[2]["messages"]][:3] == [
        "Once upon a time",
        said[2][1],
        "And then",
    ]
    page.click("#clear")
    page.reload()
    expect(page.locator("#start")).to_be_visible()
    assert page.locator(".exchange").count() == 0
    page.locator("#examples button").first.click()
    expect(page.locator(".said")).to_contain_text("Once upon a time there lived")
    expect(page.locator(".exchange")).to_have_attribute("aria-busy", "false")


SILENT = {"model": {"sampling_defaults": {}, "chat_defaults": {"temperature": 0.7, "top_p": 0.9}}}
GREEDY = {"model": {"sampling_defaults": {"temperature": 0.0, "top_k": 20}, "chat_defaults": {}}}
DRAWN = ("temperature", "top_p", "top_k")


@pytest.mark.parametrize(
    ("facts", "chat_sends", "shown"),
    [
        # the demo model's own
        (None, {"top_p": 0.9}, {"Completion": ["0.65", "1", "0"], "Chat": ["0.65", "0.9", "0"]}),
        (
            SILENT,
            {"temperature": 0.7, "top_p": 0.9},
            {"Completion": ["1", "1", "0"], "Chat": ["0.7", "0.9", "0"]},
        ),
        pytest.param(
            GREEDY,
            {},
            {"Completion": ["0", "1", "20"], "Chat": ["0", "1", "20"]},
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_what_nobody_sets_is_the_model_s(
    page: Any, server: str, facts: Any, chat_sends: dict[str, float], shown: dict[str, list[str]]
) -> None:
    """The server goes by generation_config.json where a request is silent.

    A chat fills in what that leaves open.
    """
    if facts is not None:
        page.route("**/v1/capabilities", lambda route: route.fulfill(json=facts))
    open_live(page, server)
    expect(page.locator("#top_k")).to_have_attribute("placeholder", shown["Chat"][2])
    bodies = note_posts(page)
    page.fill("#max_tokens", "2")
    for kind, sent in (("Completion", {}), ("Chat", chat_sends)):
        page.locator(f"[name=kind][value={kind.lower()}]").check(force=True)
        assert [page.get_attribute(f"#{name}", "placeholder") for name in DRAWN] == shown[kind]
        page.fill("#prompt", "Once upon a time")
        page.click("#send")
        expect(page.locator(".note").last).to_contain_text("2 tokens")
        expect(page.locator("#send")).to_be_enabled()
        assert {name: bodies[-1][name] for name in DRAWN if name in bodies[-1]} == sent
    note = page.locator("#defaults").inner_text()
    assert ("top_p 0.9 (default of chats)" in note) == bool(chat_sends)
    page.fill("#temperature", "1.5")
    page.fill("#top_k", "0")
    page.fill("#prompt", "And then")
    page.click("#send")
    expect(page.locator(".exchange")).to_have_count(3)
    expect(page.locator(".note").last).to_contain_text("2 tokens")
    assert bodies[-1]["temperature"] == 1.5 and bodies[-1]["top_k"] == 0, (
        "what somebody sets is sent, zero too"
    )


def go_on(route: Any) -> None:
    """Sends a request on that does not end with its answer."""
    body = {**route.request.post_data_json, "ignore_eos": True, "max_tokens": 128}
    route.continue_(post_data=json.dumps(body))


@pytest.mark.sweep  # an engine of its own; tests/test_page_views.py has pictures without one
def test_a_picture_is_asked_about_and_its_blocks_say_so(page: Any) -> None:
    config = EngineConfig(model="demo-vision", **POOL, max_num_batched_tokens=64)
    with when_used():
        built = build_engine(config)
    loop = AsyncDriver(built)
    loop.start()
    with served_engine(loop, built, model="demo-vision") as address:
        open_live(page, address, "Chat")
        let_go(page, "#playground", "drop", ("yellow.png", "image/png", YELLOW.read_bytes()))
        expect(page.get_by_role("img", name="yellow.png")).to_be_visible()
        page.route("**/v1/chat/completions", go_on)
        page.fill("#temperature", "0")
        page.fill("#prompt", "What is in the picture?")
        with pace_of(loop).hold(0.5):
            page.click("#send")
            expect(page.locator(".requests .state").first).to_have_text("running")
            page.locator(".requests button").first.focus()
            expect(page.locator("#detail")).to_contain_text("with 1 picture")
            strip = page.locator(".table li.picture").first
            expect(strip).to_have_attribute("title", re.compile(r"picture 1, rows 0 to \d+$"))
            expect(page.locator(".exchange .text")).to_contain_text("a yellow circle")
            page.click("#stop")
        page.goto("about:blank")  # which ends the stream of snapshots
    assert loop.stop(60)


def test_a_refusal_is_reported(page: Any, server: str) -> None:
    page.allowed.append("400")
    open_live(page, server)
    page.fill("#n", "16")
    page.click("#send")
    expect(page.locator(".note.problem")).to_contain_text("max_num_seqs is 8")


def counts_of(loop: AsyncDriver) -> Counter[str]:
    stats = loop.call(Engine.stats).result(60)
    whole = {name: value for name, value in stats.items() if isinstance(value, int)}
    return Counter({**whole, "preempted": sum(stats["num_preemptions_total"].values())})


def test_the_tour_tells_what_the_engine_did(page: Any, server: str, loop: AsyncDriver) -> None:
    open_live(page, server)
    assert page.get_by_label("Slow motion").count() == 1, "one switch, which nothing contradicts"
    costs = page.locator(".cost")
    expect(costs.nth(1)).to_contain_text(re.compile(r"1 request, \d+ tokens, about \d+ s$"))
    page.select_option("#pace", "1")
    expect(costs.nth(1)).to_contain_text(re.compile("tokens, about (4|5)[0-9] s$"))
    page.select_option("#pace", "0")
    expect(costs.nth(1)).to_contain_text(re.compile(r"1 request, \d+ tokens$"))

    def play(name: str) -> tuple[str, Counter[str]]:
        before = counts_of(loop)
        page.get_by_role("button", name=name).click()
        expect(page.locator("#tour-outcome")).not_to_be_empty()
        expect(page.locator("#tour-stop")).to_be_disabled()
        assert page.locator("#tour-text").inner_text().count(".") == 1, "one sentence"
        after = counts_of(loop)
        after.subtract(before)
        return page.locator("#tour-outcome").inner_text(), after

    outcome, gained = play("Share a prefix")
    assert (
        gained["prefix_cache_hits_total"] >= 48
        and f" {gained['prefix_cache_hits_total']} tokens" in outcome
    )
    outcome, gained = play("Fork three samples")
    assert gained["copy_on_write_blocks_total"] == int(outcome.split()[0]) == 2
    outcome, gained = play("Beam search")
    assert 0 < int(outcome.split()[0]) <= gained["copy_on_write_blocks_total"]
    outcome, gained = play("Force a preemption")
    assert gained["preempted"] >= outcome.count("#") >= 1 and "finished" in outcome
    assert page.locator(".note").count() == 5 and page.locator(".note.problem").count() == 0
    assert page.locator(".cost").all_inner_texts()[4] == "not on this server: why?"
    page.get_by_role("button", name="Speculate").click(force=True)
    expect(page.locator("#tour-text")).to_contain_text("speculation is off")


def test_slow_motion_lasts_as_long_as_somebody_looks(
    page: Any, server: str, loop: AsyncDriver, demo_build: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, step = [], demo_build.engine.step
    monkeypatch.setattr(demo_build.engine, "step", lambda: begun.append(time.monotonic()) or step())
    open_live(page, server)
    page.select_option("#pace", "0.25")
    expect(page.locator("#status")).to_have_text("live, 0.25 s per step")
    page.fill("#max_tokens", "4")
    page.click("#send")
    expect(page.locator(".note")).to_contain_text("4 tokens")
    wait_until(lambda: len(begun) >= 4)
    assert min(np.diff(begun)) > 0.24
    expect(page.locator("#step-numbers")).to_contain_text("decode")
    page.fill("#max_tokens", "200")
    page.click("#send")
    expect(page.locator(".exchange").last.locator(".token").nth(1)).to_be_visible()
    page.click("#stop")
    expect(page.locator("#numbers")).to_contain_text("0 in use", timeout=2000)
    page.goto("about:blank")
    for _ in range(100):
        if pace_of(loop).seconds == 0:
            break
        page.wait_for_timeout(50)
    assert pace_of(loop).seconds == 0


def test_the_page_of_several_models_shows_the_chosen_one(page: Any, tmp_path: Path) -> None:
    """Looking at a model neither loads it nor keeps it in memory."""
    page.allowed.append("500")
    models = [
        {"name": "demo", "model": "demo", "settings": SIZES},
        {"name": "gone", "model": str(tmp_path / "gone")},
    ]
    with serving(tmp_path / "models.yaml", models, ui=True) as several:
        slot = several.table.slots["demo"]
        page.goto(several.address)
        expect(page.locator("#notice-text")).to_contain_text("demo is not loaded")
        assert httpx.get(f"{several.address}/debug/state?model=demo").status_code == 409
        assert httpx.get(f"{several.address}/debug/state").status_code == 400
        page.click("#notice-act")
        expect(page.locator("#status")).to_have_text("live")
        expect(page.locator("#numbers")).to_contain_text("0 in use")
        assert slot.state == "loaded" and slot.num_leases == 0
        httpx.post(f"{several.address}/sleep", json={"model": "demo"}).raise_for_status()
        assert httpx.get(f"{several.address}/debug/state?model=demo").status_code == 200
        page.locator("#examples button").first.click()
        expect(page.locator(".note")).to_contain_text(re.compile(r"^demo · \d+ tokens"))
        expect(page.locator(".requests")).to_contain_text("finished")
        httpx.post(f"{several.address}/api/generate", json={"model": "demo", "keep_alive": 0})
        expect(page.locator("#status")).to_have_text("not loaded")
        expect(page.locator("#grid")).to_be_hidden()
        page.select_option("#models", "gone")
        expect(page.locator("#notice-text")).to_contain_text("gone is not loaded")
        page.click("#notice-act")
        expect(page.locator("#notice.problem")).to_contain_text("cannot be loaded")
        page.wait_for_timeout(2500)  # the page has looked at the states again
        expect(page.locator("#notice.problem")).to_contain_text("cannot be loaded")


HOSTILE = '<img src=x onerror="window.broken=1"><script>window.broken=1</script><b>bold</b>'


@pytest.mark.parametrize("with_tokens", few([False, True], [True]))
def test_markup_in_a_text_stays_text(page: Any, server: str, with_tokens: bool) -> None:
    open_live(page, server)
    logprobs = {
        "tokens": [HOSTILE],
        "token_logprobs": [-0.5],
        "top_logprobs": [{HOSTILE: -0.5, "<i>": -1.0}],
    }
    choice = {
        "index": 0,
        "text": HOSTILE,
        "logprobs": logprobs if with_tokens else None,
        "finish_reason": HOSTILE,
    }
    page.fill("#prompt", HOSTILE)
    body = f"data: {json.dumps({'choices': [choice]})}\r\n\r\ndata: [DONE]\r\n\r\n"
    page.route(
        "**/v1/completions",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    page.click("#send")
    expect(page.locator(".column .text")).to_have_text(HOSTILE)
    expect(page.locator(".said")).to_contain_text(HOSTILE)
    expect(page.locator(".column p")).to_have_text(HOSTILE)
    if with_tokens:
        page.locator(".token").hover()
        expect(page.locator("#tooltip")).to_contain_text("<i>")
    assert page.evaluate("window.broken") is None
    assert page.locator("main img, main script, .exchange b, #tooltip i").count() == 0


def test_the_key_is_requested(page: Any, loop: AsyncDriver, demo_build: Built) -> None:
    page.allowed.append("401")
    with served_engine(loop, demo_build, api_keys=[KEY]) as address:
        page.goto(f"{address}/ui/")
        dialog = page.locator("#key-dialog")
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#status")).to_have_text("needs a key")
        page.click("#notice-act")
        expect(dialog).to_be_visible()
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-text")).to_contain_text("refused")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_have_text("live")
        expect(page.locator("#model")).to_have_text("demo")
        assert (
            page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])")
            == '[{},{},""]'
        )
        page.goto("about:blank")


@pytest.fixture(scope="module")
def files() -> Iterator[str]:
    """Serves the page without an engine."""
    with served(Starlette(routes=page_routes())) as address:
        yield address


def without_times(snapshot: Any) -> Any:
    """Returns the snapshot without times and prompts, which the log and the engine have
    differently.
    """
    omitted = {
        "snapshot": {"clock", "compiles"},
        "request": {"timeline", "prompt"},
        "step": {"seconds", "draws", "results", "accepted", "tables"},
    }

    def drop(kind: str, fields: Any) -> Any:
        return {name: fields[name] for name in fields.keys() - omitted[kind]}

    return {
        **drop("snapshot", snapshot),
        "requests": [drop("request", request) for request in snapshot["requests"]],
        "step": drop("step", snapshot["step"]),
        "history": [entry[:3] for entry in snapshot["history"]],
        "copies": [copy for copy in snapshot["copies"] if copy[0] == snapshot["step"]["step"]],
    }


CROWDS = ["crowd", "crowd_of_several_steps", "crowd_of_groups"]


@pytest.mark.parametrize("which", few(CROWDS, ["crowd", "crowd_of_groups"]))
def test_a_log_shows_what_the_engine_showed(which: str, request: pytest.FixtureRequest) -> None:
    """It shows every block, request and step as the engine had them while the log was recorded."""
    log, text, snapshots, _ = request.getfixturevalue(which)
    assert ("[-1]" in log) == (which == "crowd_of_several_steps")
    assert ("further_tables" in log) == (which == "crowd_of_groups")
    header, first, *shown = map(json.loads, text.splitlines())
    assert header == {"event": "snapshots", "format": 1, "log": "run.jsonl"}
    assert first["step"] is None and not first["requests"]
    assert len(shown) >= len(snapshots) > 100
    for moment, expected in zip(shown, snapshots, strict=False):
        assert without_times(moment) == without_times(expected), f"step {expected['num_steps']}"
        assert moment["clock"] == {"unit": "steps", "now": expected["step"]["step"]}
        for line, other in zip(moment["requests"], expected["requests"], strict=True):
            assert [(kind, num) for kind, _, _, num in line["timeline"]] == [
                (kind, num) for kind, _, _, num in other["timeline"]
            ]
    states = Counter(request["state"] for snapshot in snapshots for request in snapshot["requests"])
    assert states["preempted"] and states["swapped"] and states["finished"], (
        "the crowd shows everything"
    )


def test_a_log_is_opened_and_walked_through(page: Any, files: str, crowd: Crowd) -> None:
    snapshots = crowd.snapshots
    open_log(page, files, crowd.shown)
    expect(page.locator("#playground")).to_be_hidden()
    expect(page.locator("#moment")).to_have_text(f"step 1 of {len(snapshots)}")
    expect(page.locator("#scrubber")).to_be_focused()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#moment")).to_have_text(f"step 4 of {len(snapshots)}")
    used = sum(count > 0 for count in snapshots[3]["pool"]["ref_counts"])
    expect(page.locator("#numbers")).to_contain_text(f"{used} in use")
    expect(page.locator("#grid")).to_have_attribute("data-cells", str(POOL["num_blocks"]))
    page.click("#back")
    expect(page.locator("#moment")).to_have_text(f"step 3 of {len(snapshots)}")
    page.get_by_role("button", name="Play").click()
    # it goes on while we look
    expect(page.locator("#moment")).to_have_text(re.compile(r"^step ([5-9]|\d\d+) of"))
    page.click("#leave-log")
    expect(page.locator("#playground")).to_be_visible()


def test_a_step_of_a_log_has_its_plan_and_probabilities(
    page: Any, files: str, crowd: Crowd
) -> None:
    log, shown, snapshots, _ = crowd
    results = [
        each for each in map(json.loads, log.splitlines()) if each["event"] in ("result", "failure")
    ]
    moment = next(
        moment for moment, each in enumerate(results, start=1) if len(each.get("logprobs", ())) > 2
    )
    open_log(page, files, shown)
    page.locator("#scrubber").fill(str(moment))
    expect(page.locator("#moment")).to_contain_text(f"step {moment} ")
    snapshot, walk = snapshots[moment - 1], Walk()
    for record in map(json.loads, log.splitlines()):
        walk.follow(record)
        if record["event"] == "plan" and record["step"] == moment:
            break
    rows = page.locator("#plan tbody tr")
    expect(rows).to_have_count(len(snapshot["step"]["rows"]))
    for index, (number, sequence, start, _, _) in enumerate(snapshot["step"]["rows"]):
        cells = rows.nth(index).locator("td").all_inner_texts()
        assert (cells[0], cells[1]) == (f"#{number}", str(sequence)) and cells[2].startswith(
            str(start)
        )
        assert cells[4] == " ".join(map(str, walk.sequences[sequence].tables[0]))
    for index, (_, _, ids, bits) in enumerate(results[moment - 1]["logprobs"]):
        texts = page.locator(".draws > li").nth(index).locator(".tip-row").all_inner_texts()
        shares = np.exp(np.array(bits, np.int32).view(np.float32))
        expected = dict(zip(ids[1:], 100 * shares[1:], strict=True)) | {ids[0]: 100 * shares[0]}
        shown_shares = {int(text.split()[0]): float(text.split()[1]) for text in texts}
        assert all(
            math.isclose(shown_shares[token], expected[token], abs_tol=0.06)
            for token in shown_shares
        )
        assert set(ids[1:]) <= shown_shares.keys() and list(shown_shares.values()) == sorted(
            shown_shares.values(), reverse=True
        )


def test_texts_of_tokens_stand_beside_their_ids(
    page: Any, files: str, tmp_path: Path, crowd: Crowd
) -> None:
    """`jaxpage replay --texts` has put them into the header of the log."""
    header, *records = crowd.log.splitlines()
    results = [each for each in map(json.loads, records) if each["event"] == "result"]
    moment = next(moment for moment, each in enumerate(results, start=1) if each.get("logprobs"))
    ids = results[moment - 1]["logprobs"][0][2]
    texts = {str(token): f" <b>{token}" for token in ids[1:]}
    # An incident, whose snapshots need no engine.
    about = {"texts": texts, "incident": {"reason": "asked", "why_not_replayable": "for a test"}}
    log = "\n".join([json.dumps(json.loads(header) | about), *records, ""])
    open_log(page, files, snapshots_of(log, tmp_path))
    page.locator("#scrubber").fill(str(moment))
    shown = page.locator(".draws > li").first.locator(".tip-row code").all_inner_texts()
    assert (
        {f"{token}:␣<b>{token}" for token in ids[1:]}
        <= set(shown)
        <= {f"{token}:␣<b>{token}" for token in ids}
    )


def test_an_incident_shows_the_last_steps(
    page: Any, files: str, tmp_path: Path, crowd: Crowd
) -> None:
    """It has no token ids and begins in the middle; its block tables are the engine's."""
    text = snapshots_of(crowd.incident, tmp_path)
    open_log(page, files, text)
    expect(page.locator("#log-name")).to_contain_text("incident: asked for")
    expect(page.locator("#moment")).to_contain_text(f"of {INCIDENT_STEP}")
    num_compared = 0
    _, _, *shown = map(json.loads, text.splitlines())
    snapshots = crowd.snapshots[INCIDENT_STEP - INCIDENT_STEPS : INCIDENT_STEP]
    for moment, expected in zip(shown, snapshots, strict=True):
        for name in ("step", "bucket", "kind", "num_draws", "copies", "swap_out", "swap_in"):
            assert moment["step"][name] == expected["step"][name]
        by_id = {request["id"]: request for request in expected["requests"]}
        rows = {row[1] for row in moment["step"]["rows"]}
        for request in moment["requests"]:
            engines = by_id[request["id"]]
            assert request["state"] == engines["state"] or engines["state"] == "running"
            sequences = {sequence["id"]: sequence for sequence in engines["sequences"]}
            for sequence in request["sequences"]:
                if request["state"] == "running" and sequence["id"] in rows:
                    other = sequences[sequence["id"]]
                    assert sequence["blocks"] == other["blocks"]
                    assert sequence["known"] == other["known"]
                    assert sequence["computed"] == other["computed"]
                    num_compared += 1
                elif sequence["host_blocks"]:  # a fork without a row yet shows none
                    assert sequence["host_blocks"] == sequences[sequence["id"]]["host_blocks"]
    assert num_compared > INCIDENT_STEPS


def test_a_damaged_log_is_reported(page: Any, files: str, crowd: Crowd) -> None:
    shown = crowd.shown
    open_log(page, files, shown)
    page.click("#leave-log")
    for text, message in (
        ("", "does not have the snapshots of an event log"),
        (crowd.log, "jaxpage replay run.jsonl --snapshots snapshots.jsonl"),
        (shown.replace('"format":1', '"format":9', 1), "format is 9"),
        (shown.partition("\n")[0] + "\n", "it has no snapshots"),
        (shown + '{"event":"<b>"}\n', "is not a snapshot"),
        (shown + "[1, 2\n", "is not a snapshot"),
    ):
        choose_log(page, text)
        expect(page.locator("#problem")).to_contain_text(message)
        expect(page.locator("#replay")).to_be_hidden()
    choose_log(page, shown + '{"clock":{"un')
    expect(page.locator("#log-name")).to_contain_text("cut off at its end")


def test_the_keyboard_shows_what_a_block_is(page: Any, files: str, crowd: Crowd) -> None:
    snapshots = crowd.snapshots
    moment, block = next(
        (moment, block)
        for moment, snapshot in enumerate(snapshots, start=1)
        for block, count in enumerate(snapshot["pool"]["ref_counts"])
        if count > 1
    )
    open_log(page, files, crowd.shown)
    page.locator("#scrubber").fill(str(moment))
    page.locator("#grid").focus()
    page.keyboard.press("Home")
    for _ in range(block):
        page.keyboard.press("ArrowRight")
    count = snapshots[moment - 1]["pool"]["ref_counts"][block]
    expect(page.locator("#detail")).to_contain_text(f"Block {block} has {count} references")
    expect(page.locator(".table", has_text="positions")).to_have_count(min(count, 8))
    expect(page.locator(".table li.here").first).to_have_text(str(block))
    page.keyboard.press("Enter")
    page.locator("#theme").focus()
    expect(page.locator("#detail")).to_contain_text(f"Block {block} ")
    page.keyboard.press("Escape")
    expect(page.locator("#detail")).to_contain_text("Point at a block")


def test_light_and_dark(browser: Any, files: str) -> None:
    for scheme, other in (("light", "dark"), ("dark", "light")):
        page = browser.new_page(color_scheme=scheme)
        page.goto(f"{files}/ui/")
        root = page.locator("html")
        expect(root).to_have_attribute("data-theme", scheme)
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.get_by_label("Light or dark").click()
        expect(root).to_have_attribute("data-theme", other)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
        page.close()
