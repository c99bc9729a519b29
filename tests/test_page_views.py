"""The page's drawings without an engine: Markdown, a pool of 30,000 blocks, timelines, small
screens. Its states are faked.
"""

from __future__ import annotations

import base64
import html.parser
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from markdown_it import MarkdownIt
from starlette.applications import Starlette

from jaxpage.serving.inspector.routes import page_routes
from tests.support.browsing import CHROMIUM, launched, let_go, opened, png_of
from tests.support.served import served
from tests.support.sweeps import few

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
expect = playwright.expect
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="there is no /usr/bin/chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched(playwright) as browser:
        yield browser


@pytest.fixture(scope="module")
def files() -> Iterator[str]:
    with served(Starlette(routes=page_routes())) as address:
        yield address


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    with opened(browser) as page:
        yield page


# Markdown

TEXT = """# A title with `code`

Some *emphasis*, **strong words**, ***both***, `a *b* c`, ~~gone~~ and snake_case_words, 2 * 3 * 4.
A second line with [a link](https://example.org/a_(b) "title") and \\*no emphasis\\*.

# C#
# closed # ##
# ####

- one
- two with **bold**
  - inner *one*
  - inner two
- three

3. third
4. fourth

> quoted *text*
> > twice

```python
def f(x): # <b>
    return x ** 2
```

| a | b |
|---|:-:|
| 1 | *2* |

---

Unclosed **strong and `code, a < b && c > d.
<b>html</b> & <script>alert(1)</script>"""

SERIALISE = """async (text) => {
    const { markdown } = await import("/ui/markdown.js");
    const attributes = (node) => Object.fromEntries([...node.attributes].map((one) => [one.name, one.value]));
    const of = (node) => node.nodeType === 3 ? node.data : [node.tagName.toLowerCase(), attributes(node), [...node.childNodes].map(of)];
    return markdown(text).map(of);
}"""


class Tree(html.parser.HTMLParser):
    """Elements of an HTML text as [tag, attributes, children]."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root: list[Any] = ["", {}, []]
        self._open = [self.root]
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        element = [tag, dict(attributes), []]
        self._open[-1][2].append(element)
        if tag not in ("hr", "br"):
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("hr", "br"):
            self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1][2].append(data)


def plain(nodes: list[Any]) -> list[Any]:
    """Returns what two renderings have in common: no layout, no classes, text joined."""
    result: list[Any] = []
    for node in nodes:
        if isinstance(node, str):
            if result and isinstance(result[-1], str):
                result[-1] += node
            else:
                result.append(node)
        elif node[0] == "div":
            result += plain(node[2])
        else:
            tag = {"s": "del", "h1": "h3"}.get(node[0], node[0])
            attributes = {
                name: value for name, value in node[1].items() if name in ("href", "start")
            }
            result.append([tag, attributes, plain(node[2])])
    stripped = [each.strip("\n") if isinstance(each, str) else each for each in result]
    return [each for each in stripped if each != ""]


def test_markdown_is_what_a_library_makes_of_it(page: Any, files: str) -> None:
    page.allowed.append("404")
    page.goto(f"{files}/ui/")
    oracle = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    shown = page.evaluate(SERIALISE, TEXT)
    assert plain(shown) == plain(Tree(oracle.render(TEXT)).root[2])
    for end in range(0, len(TEXT), 7):  # as it streams
        page.evaluate(SERIALISE, TEXT[:end])


ADDRESSES = (
    "javascript:alert(1)",
    "JaVaScRiPt:alert(1)",
    "data:text/html,<script>",
    " javascript:a",
    "vbscript:a",
    "//x.y",
    "file:///etc",
)
HOSTILE = [
    *(f"[a]({one}) ![b]({one}) <{one}>" for one in ADDRESSES),
    '<img src=x onerror="window.broken=1">',
    "<script>window.broken=1</script>",
    "```<script>\n</code></pre><img src=x onerror=window.broken=1>\n```",
    "| <svg onload=window.broken=1> | b |\n|---|---|\n| <iframe src=javascript:a> | [x](javascript:a) |",
    '[a](https://x.y/"onmouseover="window.broken=1)',
    "![tracker](https://tracker.example/pixel.png)",
    "> " * 5000 + "deep",
    "- " * 5000 + "deep",
    "*" * 20_000,
    "**a " * 5000,
    "[a](" * 5000,
    "`" * 3000 + "".join("`" * number + " " for number in range(100)),
    "|" * 5000 + "\n" + "|-" * 5000,
]
SPACES = " " * 190_000
LONG = [
    "# a" + SPACES + "x",
    "# a " + "#" * 190_000 + "x",
    "[a](" + SPACES + "x",
    "[a](b" + SPACES + "x",
    "[" * 190_000 + "](",
]
LONG += [
    "ahttp://" * 23_000,
    "* * *" + SPACES + "x",
    "http://" + "." * 190_000,
    "```" + SPACES + "x",
    "|" + SPACES + "|\n|-|",
]
TAGS = {
    "p",
    "h3",
    "h4",
    "h5",
    "h6",
    "ul",
    "ol",
    "li",
    "pre",
    "code",
    "em",
    "strong",
    "del",
    "a",
    "blockquote",
    "hr",
}
TAGS |= {"table", "thead", "tbody", "tr", "th", "td", "div", "span"}
ATTRIBUTES = {"href", "target", "rel", "tabindex", "aria-label", "role", "class", "start"}


def test_markdown_of_a_hostile_model_is_harmless(page: Any, files: str) -> None:
    """An answer in the chat has no element but those of Markdown, and no address but http and mail;
    nothing is fetched.
    """
    page.allowed.append("404")
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto(f"{files}/ui/")
    page.locator("[name=kind][value=chat]").check(force=True)
    chunk = {
        "choices": [
            {"index": 0, "delta": {"content": "\n\n".join(HOSTILE)}, "finish_reason": "stop"}
        ]
    }
    body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    page.fill("#prompt", "x")
    page.click("#send")
    expect(page.locator(".markdown")).to_contain_text("tracker")
    elements = page.locator(".markdown").evaluate(
        "(one) => [...one.querySelectorAll('*')].map((e) => [e.tagName.toLowerCase(), "
        "[...e.attributes].map((a) => [a.name, a.value])])"
    )
    assert {tag for tag, _ in elements} <= TAGS
    attributes = [pair for _, pairs in elements for pair in pairs]
    assert {name for name, _ in attributes} <= ATTRIBUTES
    addresses = [value for name, value in attributes if name == "href"]
    assert addresses and all(re.match("https?://", address) for address in addresses)
    assert page.evaluate("window.broken") is None
    assert all(url.startswith(files) for url in requested), "nothing is fetched from elsewhere"
    for text in [*HOSTILE, *LONG]:
        took = page.evaluate(
            """async (text) => {
                const { markdown } = await import("/ui/markdown.js");
                const began = performance.now();
                markdown(text);
                return performance.now() - began;
            }""",
            text,
        )
        assert took < 2000, text[:40]


# A large pool

NUM_BLOCKS = 30_001


def state(num_blocks: int = NUM_BLOCKS, *, num_requests: int = 40) -> dict[str, Any]:
    """Returns the state of an engine in which requests have blocks all over the pool."""
    counts, cached, requests = [0] * num_blocks, [], []
    per_request = min(25, (num_blocks - 1) // (2 * num_requests))
    for number in range(1, num_requests + 1):
        blocks = [
            1 + (number * 7919 + index * 104_729) % (num_blocks - 1) for index in range(per_request)
        ]
        for block in blocks:
            counts[block] += 1
        cached += blocks[:5]
        known = 16 * len(blocks) - 3
        sequence = {
            "id": number,
            "sample": 0,
            "known": known,
            "computed": known - 1,
            "blocks": blocks,
            "host_blocks": [],
        }
        timeline = [
            ["queued", 0.0, 0.5, 0],
            ["chunk", 0.5, 1.0, 64],
            ["decode", 1.0, None, known - 64],
        ]
        requests.append(
            {
                "number": number,
                "id": f"request-{number}",
                "state": "running",
                "beam_width": 0,
                "num_sequences": 1,
                "prompt_tokens": 64,
                "max_total_tokens": 512,
                "cached_tokens": 0,
                "num_preemptions": 0,
                "prompt": "A prompt that is shown",
                "sequences": [{**sequence, "further_blocks": [[num_blocks + number - 1]]}],
                "timeline": timeline,
            }
        )
    further = {
        "window": 64,
        "num_blocks": 50,
        "num_free": 50 - num_requests,
        "first_block": num_blocks,
        "kept": [],
    }
    further["ref_counts"] = [1] * num_requests + [0] * (50 - num_requests)
    pool = {
        "block_size": 16,
        "num_blocks": num_blocks,
        "num_host_blocks": 0,
        "ref_counts": counts,
        "kept": sorted(set(cached)),
    }
    step = {
        "step": 9,
        "kind": "decode",
        "bucket": [64, 64, 1],
        "rows": [[each["number"], each["number"], 300, 1, 0] for each in requests],
        "num_draws": num_requests,
        "copies": [],
        "swap_out": [],
        "swap_in": [],
        "preempted": [],
        "seconds": 0.01,
    }
    return {
        "clock": {"unit": "seconds", "now": 3.0},
        "pool": {**pool, "further_groups": [further], "pins": []},
        "requests": requests,
        "step": step,
        "history": [[number, 40, 64, 0.01] for number in range(1, 10)],
        "copies": [],
        "num_steps": 9,
        "compiles": {"total": 3, "seconds": 1.0},
        "pace": {"seconds_per_step": 0.0, "can_be_slow": True},
    }


def open_faked(page: Any, files: str, snapshot: dict[str, Any]) -> None:
    page.allowed.append("404")
    body = f"data: {json.dumps(snapshot)}\n\n"
    page.route(
        "**/debug/events*", lambda route: route.fulfill(body=body, content_type="text/event-stream")
    )
    page.goto(f"{files}/ui/")
    expect(page.locator("#numbers")).to_contain_text("in use")


def cells(page: Any) -> int:
    return int(page.get_attribute("#grid", "data-cells"))


def test_thirty_thousand_blocks_are_as_readable_as_a_hundred(page: Any, files: str) -> None:
    snapshot = state()
    used = sum(count > 0 for count in snapshot["pool"]["ref_counts"])
    open_faked(page, files, snapshot)
    expect(page.locator("#numbers")).to_contain_text(f"{used:,} in use")
    expect(page.locator("#shown-used")).to_be_checked()
    assert used > cells(page) > 300 or cells(page) == used
    assert int(page.get_attribute("#grid", "data-size")) >= 12
    assert page.locator("main *").count() < 1500, "blocks are no elements"
    expect(page.locator("#minimap")).to_be_visible()
    page.locator("#shown-all").check(force=True)
    page.locator("#grid").focus()
    page.keyboard.press("End")
    expect(page.locator("#detail")).to_contain_text(f"Block {NUM_BLOCKS - 1} ")
    assert 100 < cells(page) < 3000 and int(page.get_attribute("#grid", "data-size")) >= 12
    box = page.locator("#minimap").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    sight = """() => {
        const box = document.querySelector("#grid").closest(".scroll");
        return box.scrollTop / (box.scrollHeight - box.clientHeight);
    }"""
    page.wait_for_function(f"() => Math.abs(({sight})() - 0.5) < 0.1")
    before = cells(page)
    page.click("#nearer")
    page.click("#nearer")
    page.wait_for_function(
        f"() => Number(document.querySelector('#grid').dataset.cells) < {before / 1.5}"
    )
    assert abs(page.evaluate(sight) - 0.5) < 0.1, "what was in the middle is there still"
    for _ in range(12):
        page.click("#further")
    page.wait_for_function(
        f"() => Number(document.querySelector('#grid').dataset.cells) > {4 * before}"
    )
    page.click("#fit")
    page.select_option("#group", "1")
    expect(page.locator("#numbers")).to_contain_text("40 in use")
    expect(page.locator("#grid")).to_have_attribute("data-cells", "50")
    page.locator("#grid").focus()
    page.keyboard.press("Home")
    expect(page.locator("#detail")).to_contain_text(f"Block {NUM_BLOCKS} has 1 reference")


def test_timelines_answer_to_pointer_touch_and_keyboard(browser: Any, files: str) -> None:
    with opened(browser, has_touch=True) as page:
        open_faked(page, files, state(513, num_requests=5))
        lane = page.locator(".timeline").nth(1)
        lane.scroll_into_view_if_needed()
        box = lane.bounding_box()
        tip = page.locator("#tooltip")
        page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 9)  # 0.75 s of 3
        expect(tip).to_have_text("prefill · 64 tokens · 0.50 s to 1.00 s (500 ms)")
        expect(page.locator("#detail")).to_contain_text("Request #2")
        expect(page.locator("#detail")).to_contain_text("A prompt that is shown")
        page.mouse.move(0, 0)
        expect(tip).to_be_hidden()
        page.touchscreen.tap(box["x"] + box["width"] * 0.9, box["y"] + 9)
        expect(page.locator("#segment")).to_contain_text("Request 2: decode")
        page.locator(".requests button").first.focus()
        page.keyboard.press("ArrowRight")
        expect(tip).to_contain_text("waiting · 0.00 s to 0.50 s")
        page.keyboard.press("ArrowRight")
        expect(page.locator("#segment")).to_contain_text("Request 1: prefill")
        page.keyboard.press("ArrowDown")
        expect(page.locator(".requests button").nth(1)).to_be_focused()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#segment")).to_contain_text("Request 2: decode")
        page.locator("#history").focus()
        page.keyboard.press("ArrowLeft")
        expect(tip).to_have_text("step 9 · 40 of 64 tokens · 10.0 ms")


def test_a_timeline_that_ended_long_ago_has_a_scale_of_its_own(page: Any, files: str) -> None:
    snapshot = state(513, num_requests=2)
    running, finished = snapshot["requests"]
    snapshot["clock"]["now"] = 103.0
    running["timeline"] = [["queued", 100.0, 100.5, 0], ["decode", 100.5, None, 9]]
    finished.update(state="finished", reasons=["length"])
    finished["timeline"] = [["chunk", 1.0, 2.0, 64], ["decode", 2.0, 3.0, 7]]
    finished["sequences"][0].update(blocks=[], further_blocks=[[]])
    open_faked(page, files, snapshot)
    expect(page.locator(".past").nth(1)).to_have_text("2.0 s, 100 s ago")
    lane = page.locator(".timeline").nth(1)
    lane.scroll_into_view_if_needed()
    box = lane.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 9)
    expect(page.locator("#tooltip")).to_have_text("decode · 7 tokens · 2.00 s to 3.00 s (1000 ms)")
    drawn = """(canvas) => [0.25, 0.75].map((share) =>
        canvas.getContext("2d").getImageData(share * canvas.width, canvas.height / 2, 1, 1).data[3])"""
    page.allowed.append("willReadFrequently")
    assert min(lane.evaluate(drawn)) > 0
    named = page.locator(".requests button").nth(1)
    assert named.inner_text().split()[:2] == ["#2", "finished"]
    assert named.get_attribute("aria-label") is None, "its name begins with what is seen"


def test_a_server_that_is_gone_shows_no_live_blocks(page: Any, files: str) -> None:
    """The faked stream ends after its snapshot, and later ones end before."""
    open_faked(page, files, state(513, num_requests=5))
    expect(page.locator("#status")).to_have_text("not live")
    expect(page.locator("#notice.problem")).to_contain_text("its last state, of ")
    assert page.evaluate("getComputedStyle(document.querySelector('#grid')).opacity") == "0.4"
    look = "getComputedStyle(document.querySelector('#inspector')).filter"
    assert page.evaluate(look) == "grayscale(1)"


def test_a_continuation_begins_with_its_first_word(page: Any, files: str) -> None:
    """It is shown below its prompt without the space between them; a line break is of the text."""
    page.allowed += ["404", "405"]
    open_faked(page, files, state(513))
    for pieces, expected in (
        ([" there", " lived"], "there lived"),
        (["  there lived"], "there lived"),
        ([" ", "there", " lived"], "there lived"),
        ([", and", " so"], ", and so"),
        (["\n\n", " next"], "\n\n next"),
    ):
        for with_tokens in (True, False):
            shown = page.evaluate(CONTINUED, [pieces, with_tokens])
            assert shown == [expected, "".join(pieces)]


CONTINUED = """async ([pieces, with_tokens]) => {
    const { Exchange } = await import("/ui/exchange.js");
    document.querySelector("#conversation").hidden = false;
    const exchange = new Exchange([{ role: "prompt", content: "x" }], { showsTokens: true });
    for (const text of pieces) {
        const logprobs = with_tokens ? { tokens: [text], token_logprobs: [-1], top_logprobs: [{}] } : undefined;
        exchange.add({ choices: [{ index: 0, text, logprobs }] });
    }
    exchange.end("");
    return [exchange.columns[0].text.textContent, exchange.firstText];
}"""


def test_a_tour_that_computes_much_is_confirmed_first(page: Any, files: str) -> None:
    """A pool of 2,050 blocks, as of a default server, takes five requests of 6,576 tokens."""
    page.allowed += ["404", "405"]
    limits = {"max_num_seqs": 64}
    facts = {"model": {"max_model_len": 8192, "has_tokenizer": True}, "limits": limits}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "large"}]}))
    page.route("**/v1/capabilities", lambda route: route.fulfill(json=facts))
    posted: list[str] = []
    page.on("request", lambda each: posted.append(each.url) if each.method == "POST" else None)
    open_faked(page, files, state(2050))
    page.evaluate("document.querySelector('#tour').inert = false")
    button = page.get_by_role("button", name="Force a preemption")
    # 128 steps compute the prompts, 256 tokens each, and 96 the outputs, each a quarter of a
    # second.
    expect(button).to_contain_text("5 requests, 32,880 tokens, about 56 s")
    button.click(force=True)
    expect(page.locator("#tour-text")).to_contain_text("computes 5 requests, 32,880 tokens")
    assert not posted
    page.locator("#tour-run").click(force=True)
    expect(page.locator("#tour-outcome.problem")).not_to_be_empty()
    assert posted


def open_seeing(page: Any, files: str, takes_pictures: bool = True) -> list[Any]:
    """Opens a chat with a model that sees; the server says which, and answers "Red." to all."""
    page.allowed += ["404", "405"]
    model = {"has_chat_template": True, "takes_pictures": takes_pictures}
    limits = {"max_pictures": 3, "max_body_bytes": 40_000, "max_num_seqs": 8}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "eye"}]}))
    facts = {"model": model, "limits": limits}
    page.route("**/v1/capabilities", lambda route: route.fulfill(json=facts))
    bodies: list[Any] = []

    def answer(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        chunk = {"choices": [{"index": 0, "delta": {"content": "Red."}, "finish_reason": "stop"}]}
        body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    open_faked(page, files, state(513))
    return bodies


RED = ("red.png", "image/png", png_of("red"))
BLUE = ("blue.png", "image/png", png_of("blue", (30, 200)))
NOISE = bytes((7 * index * index) % 251 for index in range(32_000))


def test_pictures_are_chosen_dropped_and_pasted_and_taken_away(page: Any, files: str) -> None:
    bodies = open_seeing(page, files)
    let_go(page, "#conversation", "drop", RED, BLUE)
    let_go(page, "#prompt", "paste", BLUE)
    expect(page.locator("#pictures canvas")).to_have_count(3)
    remove = page.get_by_role("button", name="Remove blue.png")
    remove.first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#pictures canvas")).to_have_count(2)
    expect(remove).to_be_focused()
    remove.click()
    expect(page.locator("#prompt")).to_be_focused()
    name, kind, content = BLUE
    page.set_input_files("#picture-file", {"name": name, "mimeType": kind, "buffer": content})
    expect(page.get_by_role("img", name="blue.png")).to_be_visible()
    expect(page.get_by_role("img", name="blue.png")).to_have_attribute("width", "14")
    look = "(one) => [one.height, one.getContext('2d').getImageData(9, 9, 1, 1).data[2]]"
    height, blue = page.get_by_role("img", name="blue.png").evaluate(look)
    assert height == 96 and blue > 240
    page.fill("#prompt", "Which colours?")
    page.click("#send")
    expect(page.locator(".exchange")).to_have_attribute("aria-busy", "false")
    urls = [f"data:image/png;base64,{base64.b64encode(each[2]).decode()}" for each in (RED, BLUE)]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    said = [*parts, {"type": "text", "text": "Which colours?"}]
    assert bodies[0]["messages"] == [{"role": "user", "content": said}]
    expect(page.locator("#pictures")).to_be_hidden()
    expect(page.locator(".said canvas")).to_have_count(2)
    page.reload()
    expect(page.locator(".said canvas")).to_have_count(2)
    expect(page.locator("#picture-button")).to_be_visible()
    let_go(page, "#form", "drop", RED)
    expect(page.locator("#pictures canvas")).to_have_count(1)
    page.click("#send")  # a picture without a word
    expect(page.locator(".exchange").nth(1)).to_have_attribute("aria-busy", "false")
    *before, _, last = bodies[1]["messages"]
    assert before == [{"role": "user", "content": said}] and last["content"] == parts[:1]


REFUSED = {
    "a.svg cannot be read as a PNG, JPEG, WebP or GIF picture.": [
        ("a.svg", "image/svg+xml", b"<svg/>")
    ],
    "b.png cannot be read as a PNG": [("b.png", "image/png", RED[2][:40])],
    "The conversation would have 4 pictures; the most are 3.": [RED, RED, BLUE, RED],
    "With this picture a request has 0.04 MiB; the server takes 0.04 MiB (--max-body-bytes).": [
        ("c.png", "image/png", RED[2] + NOISE)
    ],
}


def test_pictures_that_cannot_be_sent_are_reported(page: Any, files: str) -> None:
    open_seeing(page, files, takes_pictures=False)
    expect(page.locator("#picture-button")).to_be_hidden()
    let_go(page, "#prompt", "drop", RED)
    expect(page.locator("#picture-problem")).to_have_text("This model takes no pictures.")
    page.unroute_all()
    bodies = open_seeing(page, files)
    for sentence, dropped in REFUSED.items():
        let_go(page, "#prompt", "drop", *dropped)
        expect(page.locator("#picture-problem")).to_contain_text(sentence)
        expect(page.locator("#pictures canvas")).to_have_count(len(dropped) - 1)
        page.click("#clear")
        expect(page.locator("#picture-problem")).to_be_hidden()
    let_go(page, "#prompt", "drop", RED)
    expect(page.locator("#pictures canvas")).to_have_count(1)
    page.locator("[name=kind][value=completion]").check(force=True)
    expect(page.locator("#picture-problem")).to_contain_text("choose Chat")
    page.click("#send")
    page.locator("[name=kind][value=chat]").check(force=True)
    expect(page.locator("#picture-problem")).to_be_hidden()
    page.click("#send")
    expect(page.locator(".exchange")).to_have_count(1)
    assert [len(body["messages"]) for body in bodies] == [1]


def test_blocks_say_which_slots_a_picture_fills(page: Any, files: str) -> None:
    snapshot = state(65, num_requests=5)
    snapshot["requests"][0]["vectors"] = [[4, 30, 1, 0], [40, 8, 2, 0], [50, 3, 2, 8]]
    first, second, third, *_ = snapshot["requests"][0]["sequences"][0]["blocks"]
    open_faked(page, files, snapshot)
    sentences = {
        first: "Slots 4 to 15: picture 1, rows 0 to 11, of request #1.",
        second: "Slots 0 to 15: picture 1, rows 12 to 27, of request #1.",
        third: "Slots 0 to 1: picture 1, rows 28 to 29, of request #1. "
        "Slots 8 to 15: picture 2, rows 0 to 7, of request #1.",
    }
    for block, sentence in sentences.items():
        page.locator("#grid").focus()
        page.keyboard.press("Home")
        for _ in range(block):
            page.keyboard.press("ArrowRight")
        expect(page.locator("#detail")).to_contain_text(sentence)
    titles = page.locator(".table li.picture").evaluate_all("(all) => all.map((one) => one.title)")
    assert titles == [
        "from position 0; picture 1, rows 0 to 11",
        "from position 16; picture 1, rows 12 to 27",
        "from position 32; picture 1, rows 28 to 29; picture 2, rows 0 to 7",
        "from position 48; picture 2, rows 8 to 10",
    ]
    page.locator(".requests button").first.focus()
    expect(page.locator("#detail")).to_contain_text("tokens of prompt with 2 pictures")


SEEN = """
    const seen = (selector) => [...document.querySelectorAll(selector)]
        .filter((one) => one.checkVisibility({ visibilityProperty: true }) && !one.closest(".visually-hidden, .skip"));
    const controls = "button, input, select, textarea, summary";
"""
SMALL = f"""() => {{
    {SEEN}
    const target = (one) => one.matches("[type=checkbox], [type=radio], [type=file]") ? one.closest("label") : one;
    const isSmall = ({{ width, height }}) => Math.min(width, height) < 40;
    return seen(controls).map(target).filter((one) => isSmall(one.getBoundingClientRect())).map((one) => one.id || one.textContent);
}}"""
NAMELESS = f"""() => {{
    {SEEN}
    const isNamed = (one) => one.getAttribute("aria-label") || [...(one.labels ?? [])].some((label) => label.textContent.trim())
        || (one.matches("button, summary") && one.textContent.trim());
    return seen(`${{controls}}, canvas[tabindex], [role=group], [role=radiogroup]`).filter((one) => !isNamed(one)).map((one) => one.id);
}}"""


OVERLAPS = f"""() => {{
    {SEEN}
    const places = "#form, header, #tour";
    const labelled = seen(controls).filter((one) => one.closest(places));
    const all = [...new Set(labelled.map((one) => one.closest("label") ?? one))];
    const shared = (a, b, from, to) => Math.min(a[to], b[to]) - Math.max(a[from], b[from]) > 1;
    const meet = (one, other) => {{
        const [a, b] = [one.getBoundingClientRect(), other.getBoundingClientRect()];
        return shared(a, b, "left", "right") && shared(a, b, "top", "bottom");
    }};
    const pairs = all.flatMap((one, index) => all.slice(index + 1).map((other) => [one, other]));
    return pairs.filter((pair) => meet(...pair)).map((pair) => pair.map((one) => one.textContent));
}}"""


@pytest.mark.parametrize("width", few([320, 390], [320]))
def test_a_phone_has_room_for_all_of_it(browser: Any, files: str, width: int) -> None:
    with opened(browser, viewport={"width": width, "height": 844}, has_touch=True) as page:
        open_faked_on_phone(page, files)
        for pane in ("chat", "cache"):
            page.locator(f"[name=pane][value={pane}]").check(force=True)
            for is_open in ("false", "true"):
                page.evaluate(
                    f"document.querySelectorAll('details').forEach((one) => (one.open = {is_open}))"
                )
                assert page.evaluate(OVERLAPS) == [], pane
            assert page.evaluate("document.documentElement.scrollWidth") <= width, pane
            assert page.evaluate(SMALL) == [], pane
            assert page.evaluate(NAMELESS) == [], pane
        expect(page.locator("#grid")).to_be_visible()
        assert page.locator("#grid").bounding_box()["width"] > width - 90
        page.locator("[name=pane][value=chat]").check(force=True)
        prompt = page.locator("#prompt").bounding_box()
        assert prompt["y"] + prompt["height"] < 844, "the input is in sight below the conversation"
        heights = "(one) => [one.scrollHeight, one.clientHeight]"
        content, box = page.locator(".parameters-box").evaluate(heights)
        assert content <= box, "all parameters are in sight"


def open_faked_on_phone(page: Any, files: str) -> None:
    """Opens a page with an answer that has long words, code and a table, and a picture of the next
    message.
    """
    page.allowed.append("404")
    facts = {
        "model": {"takes_pictures": True},
        "limits": {"max_pictures": 2, "max_body_bytes": 9000},
    }
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "eye"}]}))
    page.route("**/v1/capabilities", lambda route: route.fulfill(json=facts))
    snapshot = f"data: {json.dumps(state())}\n\n"
    page.route(
        "**/debug/events*",
        lambda route: route.fulfill(body=snapshot, content_type="text/event-stream"),
    )
    long = "w" * 200
    text = f"{long}\n\n    {long}\n\n```\n{long}\n```\n\n| {long} | b |\n|---|---|\n| 1 | {long} |\n\n[{long}](https://{long})"
    chunk = {"choices": [{"index": 0, "delta": {"content": text * 3}}]}
    body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    page.goto(f"{files}/ui/")
    page.locator("[name=kind][value=chat]").check(force=True)
    page.fill("#prompt", long)
    page.click("#send")
    expect(page.locator(".markdown table")).to_have_count(3)
    expect(page.locator("#picture-button")).to_be_visible()
    let_go(page, "#prompt", "drop", RED)
    expect(page.locator("#pictures canvas")).to_be_visible()


@pytest.mark.parametrize(
    ("width", "scheme"),
    few(itertools.product([390, 1440], ["light", "dark"]), [(390, "dark"), (1440, "light")]),
)
def test_axe_finds_nothing(browser: Any, files: str, width: int, scheme: str) -> None:
    """It looks at a conversation with a long answer, an error, and the engine's state, in every
    part of the page.
    """
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    rules = {"rules": {"label-content-name-mismatch": {"enabled": True}}}
    viewport = {"width": width, "height": 900}
    with opened(browser, viewport=viewport, color_scheme=scheme, has_touch=width < 800) as page:
        page.goto(f"{files}/ui/")
        assert axe.run(page, options=rules).violations_count == 0
        open_faked_on_phone(page, files)
        page.unroute("**/v1/chat/completions")
        page.fill("#prompt", "And then")
        page.click("#send")
        expect(page.locator(".note.problem")).to_be_visible()
        for pane in ("chat", "cache"):
            if width < 800:
                page.locator(f"[name=pane][value={pane}]").check(force=True)
            results = axe.run(page, options=rules)
            assert results.violations_count == 0, results.generate_report()
