"""Chromium for the tests of the page: a browser, pages whose console must stay empty, and an event
log opened in one.
"""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
FLAGS += ["--disable-component-update", "--disable-sync"]


@contextlib.contextmanager
def launched(playwright: Any) -> Iterator[Any]:
    """Launches a browser; `playwright` is the module playwright.sync_api."""
    playwright.expect.set_options(timeout=60_000)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(browser: Any, **options: Any) -> Iterator[Any]:
    """Opens a page whose console must stay empty.

    A violation of the content security policy would be in it.
    """
    page = browser.new_page(
        **{"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **options}
    )
    page.set_default_timeout(60_000)
    complaints: list[str] = []
    page.allowed = []  # what a test brings about
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    page.close()
    assert not [text for text in complaints if not any(allowed in text for allowed in page.allowed)]


def open_log(page: Any, address: str, log: str) -> None:
    page.allowed.append("404")  # there is no engine to ask
    page.goto(f"{address}/ui/")
    choose_log(page, log)


def choose_log(page: Any, log: str) -> None:
    page.set_input_files(
        "#log-file", {"name": "run.jsonl", "mimeType": "text/plain", "buffer": log.encode()}
    )


def png_of(color: str, size: tuple[int, int] = (40, 30)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


def let_go(page: Any, selector: str, kind: str, *files: tuple[str, str, bytes]) -> None:
    """Drops or pastes files: name, media type and content of each."""
    parts = [[name, media, base64.b64encode(content).decode()] for name, media, content in files]
    page.evaluate(
        """([selector, kind, parts]) => {
            const data = new DataTransfer();
            for (const [name, type, text] of parts) {
                const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
                data.items.add(new File([bytes], name, { type }));
            }
            const options = { bubbles: true, cancelable: true };
            const event = kind === "paste"
                ? new ClipboardEvent(kind, { ...options, clipboardData: data })
                : new DragEvent(kind, { ...options, dataTransfer: data });
            document.querySelector(selector).dispatchEvent(event);
        }""",
        [selector, kind, parts],
    )
