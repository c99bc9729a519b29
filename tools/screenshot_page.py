"""Takes the pictures of the page for the documents: docs/images/page-*.png, each light and dark.

    python tools/screenshot_page.py [--out docs/images] [--chromium /usr/bin/chromium]

Needs `pip install '.[test]'` and Chromium. Servers with the demo model do what the pictures show.
Only the answer in Markdown is a sample text, because the demo model writes none.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from playwright.sync_api import Browser, Page, Playwright, sync_playwright

from jaxpage import LLM, BeamSearchParams, SamplingParams
from jaxpage.serving import ServerConfig, open_incidents, write_snapshots

DESKTOP, PHONE = (1440, 900), (390, 844)
STEP = 14  # the step of a log that is shown
SECONDS = 120.0  # seconds that a server may take to start
FLAGS = ["--no-sandbox", "--disable-gpu"]
SMALL_POOL = ("--num-blocks", "97", "--max-model-len", "256", "--swap-space-blocks", "32")
SIZES: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 61,
    "max_model_len": 96,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "use_tqdm": False,
}
PROMPTS = ["Once upon a time", "The old house", "In the morning the rabbit"]
PARAMS: list[SamplingParams | BeamSearchParams] = [
    BeamSearchParams(beam_width=3, max_tokens=16),
    SamplingParams(n=2, seed=1, max_tokens=20, logprobs=4),
    SamplingParams(temperature=0.0, max_tokens=24, logprobs=4),
]
MARKDOWN = """## Paged attention

Keys and values are kept in **blocks** of equal size, so that

1. no memory is reserved for tokens that may never come,
2. sequences with a common prefix *share* blocks.

| | contiguous | paged |
|---|---|---|
| fragmentation | external and internal | at most one block |

```python
block = block_table[position // block_size]
```

See [the paper](https://arxiv.org/abs/2309.06180)."""


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[str]:
    """Runs a server with the demo model, and yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-m",
        "jaxpage",
        "serve",
        "demo",
        "--ui",
        "--ui-show-prompts",
        "--port",
        str(port),
        *flags,
    ]
    with subprocess.Popen(command) as server:
        try:
            wait_for(f"{address}/ready")
            yield address
        finally:
            server.terminate()


def wait_for(url: str) -> None:
    """Waits until the address answers with 200."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise TimeoutError(f"{url} does not answer within {SECONDS:g} s")


@contextlib.contextmanager
def open_page(browser: Browser, address: str, scheme: str, size: tuple[int, int]) -> Iterator[Page]:
    """Opens the page in this color scheme and size."""
    width, height = size
    is_dark = scheme == "dark"
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if is_dark else "light",
        device_scale_factor=1 if width > 1000 else 2,
        has_touch=width < 1000,
    )
    page.goto(f"{address}/ui/")
    page.wait_for_function("() => document.querySelector('#status').textContent.startsWith('live')")
    page.wait_for_function("() => !document.querySelector('#tour').hidden")
    yield page
    page.close()


def post(page: Page, prompts: list[Any]) -> None:
    """Sends completions from the page, and waits for none."""
    page.evaluate(
        """(prompt) => {
            const body = JSON.stringify({ model: "demo", prompt, max_tokens: 120, ignore_eos: true });
            fetch("/v1/completions", { method: "POST", headers: { "content-type": "application/json" }, body });
        }""",
        prompts,
    )


def start_tour(page: Page, name: str) -> None:
    """Starts a tour of the page."""
    page.get_by_role("button", name=name).click()


def take_tour(browser: Browser, address: str, scheme: str, out: Path) -> None:
    """Takes three samples that fork, in slow motion, at the moment of the copies.

    Other requests run at the same time, an earlier answer fills the conversation, and the block
    tables of the samples are shown.
    """
    with open_page(browser, address, scheme, DESKTOP) as page:
        page.get_by_text("Completion", exact=True).click()
        page.fill("#prompt", "Once upon a time there lived a clever fox")
        page.click("#send")
        page.wait_for_selector("#send:not([disabled])")
        page.select_option("#pace", "0.25")
        post(
            page,
            [
                f"{name} was a rabbit who lived in an old house by the sea. One day"
                for name in ["Ben", "Mia", "Tom"]
            ],
        )
        page.wait_for_function(
            "() => document.querySelector('#queue').textContent.includes('3 running')"
        )
        start_tour(page, "Fork three samples")
        page.wait_for_function(
            "() => document.querySelector('#step-numbers').textContent.includes('copied')"
        )
        page.locator("#requests button").last.click()
        page.wait_for_timeout(150)
        page.screenshot(path=out / f"page-{scheme}.png")


def take_preemption(browser: Browser, address: str, scheme: str, out: Path) -> None:
    """Takes host memory in use, on a phone."""
    with open_page(browser, address, scheme, (PHONE[0], 1400)) as page:
        page.locator("[name=pane][value=cache]").check(force=True)
        start_tour(page, "Force a preemption")
        page.wait_for_function(
            "() => /[1-9][0-9]* (preempted|swapped)/.test(document.querySelector('#queue').textContent)"
        )
        page.wait_for_timeout(500)
        page.screenshot(path=out / f"page-phone-cache-{scheme}.png")


def take_chat(browser: Browser, address: str, scheme: str, out: Path) -> None:
    """Takes an answer in Markdown, on a phone."""
    with open_page(browser, address, scheme, PHONE) as page:
        chunk = {"choices": [{"index": 0, "delta": {"content": MARKDOWN}, "finish_reason": "stop"}]}
        body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(body=body, content_type="text/event-stream"),
        )
        page.fill("#prompt", "What is paged attention?")
        page.click("#send")
        page.wait_for_selector(".markdown table")
        page.wait_for_timeout(300)
        page.screenshot(path=out / f"page-phone-chat-{scheme}.png")


def take_large_pool(browser: Browser, address: str, scheme: str, out: Path) -> None:
    """Takes a pool of 30,000 blocks of which some hundred are in use."""
    with open_page(browser, address, scheme, DESKTOP) as page:
        page.select_option("#pace", "0.5")
        post(
            page,
            [
                [(7 * number + 13 * index) % 2000 + 5 for index in range(200 + 3 * number)]
                for number in range(40)
            ],
        )
        page.wait_for_function(
            "() => parseInt(document.querySelector('#numbers').textContent.replace(',', '')) > 500"
        )
        page.wait_for_timeout(1500)
        page.locator(".requests button").nth(2).hover()
        page.wait_for_timeout(300)
        page.screenshot(path=out / f"page-blocks-{scheme}.png")


def take_log(browser: Browser, address: str, scheme: str, log: Path, out: Path) -> None:
    """Takes a step of a log's snapshots, with its plan and its draws.

    For an incident it is the step that failed, which is the last.
    """
    with open_page(browser, address, scheme, (1440, 1500)) as page:
        page.set_input_files("#log-file", log)
        if log.stem.startswith("incident"):
            page.locator("#scrubber").press("End")
        else:
            page.locator("#scrubber").fill(str(STEP))
        page.locator(".requests button").first.click()
        page.wait_for_timeout(500)
        page.screenshot(path=out)


def record(path: Path) -> None:
    """Records a log of a beam search and samples, with probabilities."""
    with LLM("demo", event_log=str(path), **SIZES) as llm:
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def record_failure(directory: Path) -> Path:
    """Returns the incident that a server's engine writes when step STEP raises an error.

    The error is planted here.
    """
    server = ServerConfig(
        incident_steps=STEP // 2, incident_token_ids=True, incident_directory=str(directory)
    )
    with LLM("demo", **SIZES) as llm:
        built: Any = SimpleNamespace(engine=llm._engine, spec=llm.spec, model=llm._model)
        open_incidents(built, llm.config, server)
        plant_fault(llm._engine.runner)
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        while not (files := list(directory.glob("incident-*.jsonl"))):  # a thread writes it
            time.sleep(0.1)
    return files[0]


def snapshots_of(log: Path) -> Path:
    """Returns the file of a log's snapshots, which the page opens."""
    path = log.with_name(f"{log.stem}-snapshots.jsonl")
    write_snapshots(path, log)
    return path


def plant_fault(runner: Any) -> None:
    """Makes the runner raise an error in step STEP."""
    real, batches = runner.run, itertools.count(1)

    def run(batch: Any) -> Any:
        if next(batches) == STEP:
            raise RuntimeError("a fault that was planted for this picture")
        return real(batch)

    runner.run = run


def take_all(playwright: Playwright, chromium: str, out: Path, logs: dict[str, Path]) -> None:
    """Takes all pictures."""
    browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
    with serving(*SMALL_POOL) as address:
        for scheme in ("light", "dark"):
            take_tour(browser, address, scheme, out)
            take_chat(browser, address, scheme, out)
            take_preemption(browser, address, scheme, out)
            for name, log in logs.items():
                take_log(browser, address, scheme, log, out / f"page-{name}-{scheme}.png")
    with serving("--num-blocks", "30001") as address:
        for scheme in ("light", "dark"):
            take_large_pool(browser, address, scheme, out)
    browser.close()


def main() -> None:
    """Reads the command line and takes the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("docs/images"), help="default: docs/images"
    )
    parser.add_argument(
        "--chromium", default="/usr/bin/chromium", help="default: /usr/bin/chromium"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log.jsonl"
        record(log)
        logs = {"log": snapshots_of(log), "failure": snapshots_of(record_failure(Path(directory)))}
        with sync_playwright() as playwright:
            take_all(playwright, arguments.chromium, arguments.out, logs)
    for picture in sorted(arguments.out.glob("page-*.png")):
        print(picture)


if __name__ == "__main__":
    main()
