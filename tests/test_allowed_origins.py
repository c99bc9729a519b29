"""`--allowed-origins`: pages of these origins may use a server, with a key and without.

No other page may.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from jaxpage.errors import ConfigError
from jaxpage.serving.settings.resolving import resolve_both
from tests.support.browsing import CHROMIUM, launched, opened
from tests.support.raw_http import ask
from tests.support.running import demo_engine, serving

PAGE = "http://page.example:3000"
KEY = "sk-of-the-page"
SHORT = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
PREFLIGHT = {
    "Access_Control_Request_Method": "POST",
    "Access_Control_Request_Headers": "authorization,content-type,x-stainless-os",
}
FROM_PAGE = {"Origin": PAGE, "Sec_Fetch_Site": "cross-site", "Referer": f"{PAGE}/chat"}
PATHS = ("/v1/completions", "/api/generate")


@pytest.fixture(scope="module")
def demo_build():
    built = demo_engine()
    yield built
    built.engine.runner.close()


@pytest.mark.parametrize("keys", [(), (KEY,)], ids=["open", "key"])
def test_an_allowed_page_may_use_the_server_and_no_other_page(demo_build, keys):
    key = {"Authorization": f"Bearer {KEY}"} if keys else {}
    with serving(
        demo_build, api_keys=keys, allowed_origins=(PAGE, "https://other.example")
    ) as running:
        for path in PATHS:
            # a preflight has no key
            status, headers, _ = ask(running, "OPTIONS", path, Origin=PAGE, **PREFLIGHT)
            assert status == 200 and headers["access-control-allow-origin"] == PAGE
            assert "authorization" in headers["access-control-allow-headers"]
            assert "access-control-allow-credentials" not in headers
            status, headers, _ = ask(running, "POST", path, SHORT, **FROM_PAGE, **key)
            assert status == 200 and headers["access-control-allow-origin"] == PAGE
            assert "origin" in headers["vary"].lower()
            for origin in ("http://evil.example", f"{PAGE}.evil.example", "null", f"{PAGE}0"):
                requested = {**FROM_PAGE, "Origin": origin}
                status, headers, _ = ask(running, "OPTIONS", path, **requested, **PREFLIGHT)
                assert status == 400 and "access-control-allow-origin" not in headers
                status, headers, _ = ask(running, "POST", path, SHORT, **requested, **key)
                assert "access-control-allow-origin" not in headers
                # With keys the key decides, except on the paths that a page may ask for plainly.
                assert status == (200 if keys and path == PATHS[0] else 403)
        # An allowed page can read a refusal, too.
        status, headers, _ = ask(running, "POST", PATHS[0], {"model": "x"}, **FROM_PAGE, **key)
        assert status in (400, 404) and headers["access-control-allow-origin"] == PAGE
        if keys:
            status, headers, _ = ask(running, "POST", PATHS[0], SHORT, **FROM_PAGE)
            assert status == 401 and headers["access-control-allow-origin"] == PAGE
        else:
            requested = {"Host": "evil.example", "Origin": PAGE}
            assert ask(running, "POST", PATHS[0], SHORT, **requested)[0] == 403


def test_without_the_setting_no_answer_has_the_headers(demo_build):
    with serving(demo_build, api_keys=(KEY,)) as running:
        requested = {"Origin": PAGE, "Authorization": f"Bearer {KEY}"}
        status, headers, _ = ask(running, "POST", PATHS[0], SHORT, **requested)
        assert status == 200 and not any(name.startswith("access-control") for name in headers)
        assert ask(running, "OPTIONS", PATHS[0], Origin=PAGE, **PREFLIGHT)[0] == 401


@pytest.mark.parametrize(
    ("origin", "text"),
    [
        ("*", "must be exact origins"),
        ("https://*.example.com", "must be exact origins"),
        ("http://a.example/", "must be origins as browsers send them"),
        ("http://a.example/path", "must be origins as browsers send them"),
        ("http://A.example", "must be origins as browsers send them"),
        ("http://a.example:80", "must be origins as browsers send them"),
        ("a.example", "must be origins as browsers send them"),
        ("null", "must be origins as browsers send them"),
        ("file://", "must be origins as browsers send them"),
    ],
)
def test_a_pattern_and_what_is_no_origin_is_refused_in_one_line(origin, text):
    with pytest.raises(ConfigError, match=text) as refused:
        resolve_both(None, {}, {"allowed_origins": ("http://localhost:3000", origin)})
    assert str(refused.value).startswith("argument: allowed_origins.1: ") and "\n" not in str(
        refused.value
    )


ASK = """async ([address, key]) => {
    const headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key};
    const body = JSON.stringify({model: "demo", prompt: "Once upon a time", max_tokens: 4});
    try {
        const answer = await fetch(address + "/v1/completions", {method: "POST", headers, body});
        return [answer.status, answer.headers.get("x-request-id") !== null, (await answer.json()).object];
    } catch (error) { return String(error); }
}"""


@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Chromium")
def test_in_a_browser(demo_build):
    playwright = pytest.importorskip("playwright.sync_api")

    class Empty(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Empty) as site, launched(playwright) as browser:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        origin = f"http://localhost:{site.server_port}"
        try:
            for allowed in (origin, "http://localhost:1"):
                with (
                    serving(demo_build, api_keys=(KEY,), allowed_origins=(allowed,)) as running,
                    opened(browser) as page,
                ):
                    page.allowed += ["CORS policy", "ERR_FAILED", "favicon", "404", "401"]
                    page.goto(origin)
                    answers = page.evaluate(ASK, [running.address, KEY])
                    if allowed == origin:
                        assert answers == [200, True, "text_completion"]
                        assert page.evaluate(ASK, [running.address, "wrong"])[0] == 401
                    else:
                        assert answers == "TypeError: Failed to fetch"
        finally:
            site.shutdown()
