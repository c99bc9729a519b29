"""The server over real sockets: who may come in, what is refused and how, who leaves when, and how
it all ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import logging
import re
import resource
import socket
import threading
import time
from http.client import HTTPResponse

import h11
import httpx
import psutil
import pytest
from starlette.routing import Route
from tokenizers import Regex, pre_tokenizers

from jaxpage.checkpoints.tokenizers import whole_tokenizer
from jaxpage.engine.admission import Admission
from jaxpage.errors import ConfigError
from jaxpage.serving import app, server
from jaxpage.serving.dialects.registry import dialect_of
from jaxpage.serving.http import connection, request_limits
from jaxpage.serving.http.descriptors import Complaints, room_for_connections
from jaxpage.serving.http.listening import bind_socket
from jaxpage.serving.metrics.logs import TextFormatter
from jaxpage.serving.requests import generating, preparing
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.wire import completions
from jaxpage.serving.wire.errors import ApiError
from tests.support.gates import Gate
from tests.support.raw_http import OF_THE_MACHINE, answer_of, ask, request_bytes
from tests.support.running import demo_engine, serving, wait_until

KEY = "sk-test-1234"
SHORT = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
LONG = {**SHORT, "max_tokens": 400, "ignore_eos": True}
COMPLETIONS = "/v1/completions"


class Shared:
    """One server at a time on one engine; it stays for the next test that wants the same."""

    def __init__(self):
        self.built, self._stack, self._settings = demo_engine(), contextlib.ExitStack(), None

    def get(self, **settings):
        if settings != self._settings:
            self.close()
            self._running, self._settings = (
                self._stack.enter_context(serving(self.built, **settings)),
                settings,
            )
        return self._running

    def close(self):
        self._settings = None
        self._stack.close()


@pytest.fixture(scope="module")
def engines_server():
    shared = Shared()
    yield shared
    shared.close()
    shared.built.engine.runner.close()


@pytest.fixture
def open_server(engines_server):
    return engines_server.get()


@pytest.fixture
def server_with_keys(engines_server):
    return engines_server.get(api_keys=("sk-other", KEY), ui=True)


@pytest.fixture
def demo_build(engines_server):
    """Gives an engine to a test that makes a server of its own."""
    engines_server.close()
    return engines_server.built


def error_of(body: bytes) -> dict:
    """Returns the error object, whose form is OpenAI's and which tells nothing of the machine."""
    answer = json.loads(body)
    assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}
    assert not OF_THE_MACHINE.search(body.decode())
    return answer["error"]


def error_of_path(path: str, content: bytes) -> None:
    """Checks that an answer says that no key was given, in the form of the path's API."""
    plain = re.sub("/+", "/", path.partition("?")[0])  # slashes too many are passed over
    if dialect_of(plain).error is ApiError.body:
        assert error_of(content)["code"] == "invalid_api_key"
    else:
        assert "No valid API key" in str(json.loads(content)) and not OF_THE_MACHINE.search(
            content.decode()
        )


def nothing_runs(running):
    stats = running.loop.call(lambda engine: engine.stats()).result(60)
    return (
        stats["num_blocks_free"] == stats["num_blocks_total"]
        and not stats["num_requests_running"]
        and not stats["num_requests_waiting"]
        and not running.loop.num_open
    )


def reference(running) -> str:
    return json.loads(ask(running, "POST", COMPLETIONS, SHORT)[2])["choices"][0]["text"]


# Who may come in

SPELLINGS = [
    "{}/",
    "/{}",
    "/x/..{}",
    "/%2e{}",
    "{}%20",
    "{}//",
    "{};a",
    "/health/..{}",
    "{}?key=" + KEY,
    "{}/health",
    "/health{}",
]
WRONG = [
    {},
    {"Authorization": "Bearer wrong"},
    {"Authorization": f"Basic {KEY}"},
    {"Authorization": KEY},
    {"Authorization": "Bearer"},
    {"Authorization": f"Bearer {KEY}x"},
    {"Authorization": f"Bearer {KEY[:-1]}"},
    {"X-Api-Key": KEY, "Cookie": f"Authorization=Bearer {KEY}"},
    {"Authorization": f"Bearer {KEY} {KEY}"},
    {"X-Forwarded-For": "127.0.0.1", "X-Original-URL": "/health", "X-Rewrite-Url": "/health"},
]
# Of a path for each kind of answer every way is tried; of the others a GET and a POST.
LOOKED_AT = ("/v1/models", COMPLETIONS, "/v1/messages", "/debug/state", "/nothing", "*")
HOSTS = ["localhost", "a/?x=", "localhost/health?", "/health", "[::1", "a@/health#"]


def paths_of(running) -> list[str]:
    routes = [route for route in running.app.routes if isinstance(route, Route)]
    return [re.sub(r"\{name(:path)?\}", "demo", route.path) for route in routes] + [
        "/nothing",
        "/docs",
        "/debug",
        "*",
    ]


def list_closed_paths(running) -> list[str]:
    """Returns all but the two for load balancers, and the files of the page with what leads to
    them.

    Those are the same for everybody.
    """
    return [
        path
        for path in paths_of(running)
        if path not in ("/", "/health", "/ready") and not path.startswith("/ui")
    ]


def test_every_path_but_two_needs_a_key(server_with_keys):
    """It may lead nowhere, and the method, the spelling and the Host may be any."""
    paths = list_closed_paths(server_with_keys)
    assert len(paths) > 15 and "/debug/state" in paths and COMPLETIONS in paths
    requests = [(method, path, {}) for path in paths for method in ("GET", "POST")]
    for path in LOOKED_AT:
        requests += [(method, path, {}) for method in ("HEAD", "OPTIONS", "DELETE", "PUT", "BREW")]
        requests += [
            ("GET", path, wrong)
            for wrong in WRONG
            if not path.startswith("/v1/messages") or "X-Api-Key" not in wrong
        ]
        requests += [("GET", path, {"Host": host}) for host in HOSTS]
        if path != "*":
            requests += [("GET", spelling.format(path), {}) for spelling in SPELLINGS]
    for method, path, headers in requests:
        body = {} if method in ("POST", "PUT") else None
        status, answered, content = ask(server_with_keys, method, path, body, **headers)
        is_http = not (path == "*" and method != "OPTIONS")
        assert status == 401 or (status == 400 and not is_http), (method, path, headers, status)
        if status == 401:
            assert answered["www-authenticate"] == "Bearer" and KEY.encode() not in content
            if method != "HEAD":
                error_of_path(path, content)


def test_a_key_opens_and_some_paths_are_open(server_with_keys):
    for key in (KEY, "sk-other"):
        assert ask(server_with_keys, "GET", "/v1/models", Authorization=f"Bearer {key}")[0] == 200
    assert ask(server_with_keys, "GET", "/v1/models", Authorization=f"bearer  {KEY}")[0] == 200
    for path in ("/health", "/ready", "/ui/", "/ui/index.html"):
        assert ask(server_with_keys, "GET", path)[0] == 200, path
    for path in ("/health/", "/Health", "/health%00", "/ui/nothing.js", "/ui/../v1/models"):
        assert ask(server_with_keys, "GET", path)[0] == 401, path


def test_the_root_leads_to_the_page_where_there_is_one(server_with_keys):
    status, answered, _ = ask(server_with_keys, "GET", "/")
    assert (status, answered["location"]) == (307, "ui/"), (
        "relative: a proxy may have put the server elsewhere"
    )
    assert b"<title>jaxpage</title>" in ask(server_with_keys, "GET", "/ui/")[2]


NAMES = ["localhost", "LocalHost:8000", "127.0.0.1", "127.1.2.3:80", "[::1]", "[::1]:9"]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.nip.io",
    "192.168.0.1",
    "0.0.0.0",
]
FOREIGN += [
    "[::2]",
    "localhost@evil.example",
    "localhost:x",
    "localhost, evil.example",
    "2130706433",
    *HOSTS[1:],
]


def test_without_keys_everybody_on_this_machine_comes_in_and_no_page_of_another_site(open_server):
    """A browser here sends the names that the site of such a page has, by DNS, and its origin."""
    assert ask(open_server, "GET", "/v1/models", Authorization="Bearer whatever")[0] == 200
    for path in ("/v1/models", "/health", "/nothing"):
        usual = ask(open_server, "GET", path)[0]
        for host in NAMES:
            assert (
                ask(open_server, "GET", path, Host=host, Origin=f"http://{host}")[0] == usual != 403
            ), host
        for host in FOREIGN:
            status, _, body = ask(open_server, "GET", path, Host=host)
            assert status in (400, 403), host
            assert status == 400 or error_of(body)["code"] == "foreign_host"
    assert ask(open_server, "GET", "/health", Host="evil.example")[0] == 403
    for origin in (
        "http://evil.example",
        "null",
        "https://localhost",
        "http://localhost:3000",
        "file://",
        "localhost",
    ):
        for method, path in (("POST", COMPLETIONS), ("GET", "/metrics"), ("OPTIONS", COMPLETIONS)):
            status, _, body = ask(open_server, method, path, Origin=origin)
            assert status == 403 and error_of(body)["code"] == "foreign_origin"


def test_what_a_browser_sends_for_another_page_is_refused_without_an_origin_too(open_server):
    """Some requests of a page have no Origin.

    A link that somebody follows to the server is none of these.
    """
    for site in ("cross-site", "same-site"):
        for mode in ("no-cors", "cors", "same-origin"):
            requested = {"Sec_Fetch_Site": site, "Sec_Fetch_Mode": mode}
            assert ask(open_server, "GET", "/metrics", **requested)[0] == 403
        followed = {
            "Sec_Fetch_Site": site,
            "Sec_Fetch_Mode": "navigate",
            "Referer": "http://evil.example/",
        }
        assert ask(open_server, "GET", "/health", **followed)[0] == 200
        assert ask(open_server, "POST", COMPLETIONS, SHORT, **followed)[0] == 403
    assert (
        ask(open_server, "POST", COMPLETIONS, SHORT, Referer="http://evil.example/page")[0] == 403
    )
    settings = {
        "Host": "localhost:8000",
        "Origin": "http://localhost:8000",
        "Referer": "http://localhost:8000/ui/",
    }
    assert (
        ask(open_server, "POST", COMPLETIONS, SHORT, **settings, Sec_Fetch_Site="same-origin")[0]
        == 200
    )
    assert (
        ask(open_server, "GET", "/health", Sec_Fetch_Site="none", Sec_Fetch_Mode="navigate")[0]
        == 200
    )


def test_with_keys_or_for_other_machines_any_name_will_do(demo_build):
    with serving(demo_build, api_keys=(KEY,)) as running:
        requested = {
            "Host": "model.example",
            "Origin": "http://model.example",
            "Authorization": f"Bearer {KEY}",
        }
        assert ask(running, "GET", "/v1/models", **requested)[0] == 200
    with serving(demo_build, host="0.0.0.0", profile_directory="/nowhere") as running:
        assert (
            ask(running, "GET", "/v1/models", Host="model.example", Origin="http://page.example")[0]
            == 200
        )
        # which any page could ask for: they take no JSON
        for path in ("/start_profile", "/stop_profile"):
            assert ask(running, "POST", path, Origin="http://page.example")[0] == 403
            assert (
                ask(
                    running, "POST", path, b"a=b", Content_Type="application/x-www-form-urlencoded"
                )[0]
                == 415
            )
        assert ask(running, "POST", "/stop_profile")[0] == 409


# What the log says of refusals

SECRET = "hunter2"
REFUSED = [
    (
        "POST",
        COMPLETIONS,
        {**SHORT, "temperature": 9},
        {"status": 400, "path": COMPLETIONS, "param": "temperature"},
    ),
    (
        "POST",
        COMPLETIONS,
        {**SHORT, "prompt": SECRET * 9999},
        {"param": "prompt", "code": "context_length_exceeded"},
    ),
    (
        "POST",
        COMPLETIONS,
        {**SHORT, "model": SECRET},
        {"status": 404, "param": "model", "code": "model_not_found"},
    ),
    (
        "POST",
        COMPLETIONS,
        {**SHORT, "stop": [SECRET, 5]},
        {"status": 400, "path": COMPLETIONS, "reason": "invalid"},
    ),
    ("POST", "/tokenize", f'{{"{SECRET}'.encode(), {"status": 400, "path": "/tokenize"}),
    ("GET", f"/v1/{SECRET}", None, {"status": 404, "reason": "not_found"}),
    ("GET", f"/v1/models/{SECRET}", None, {"status": 404, "code": "model_not_found"}),
    ("DELETE", COMPLETIONS, None, {"status": 405, "method": "DELETE"}),
    (SECRET.upper(), "/version", None, {"status": 405}),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "message"), REFUSED, ids=[f"{row[0]} {row[1]}" for row in REFUSED]
)
def test_a_refusal_is_a_line_without_the_client_s_text(
    open_server, caplog, method, path, body, message
):
    caplog.set_level(logging.INFO, logger="jaxpage")
    ask(open_server, method, path, body, x_request_id="r-1")
    [record] = [record for record in caplog.records if record.message == "refused"]
    assert {**vars(record), **message, "id": "r-1"} == vars(record)
    line = TextFormatter().format(record)
    assert "\n" not in line and len(line) < 300 and SECRET not in line.lower(), line


def test_a_refusal_tells_a_path_of_the_servers_own_before_it_is_routed(server_with_keys, caplog):
    caplog.set_level(logging.INFO, logger="jaxpage")
    for path in ("/v1/models", "/metrics", f"/v1/{SECRET}", "/v1/models/demo"):
        assert ask(server_with_keys, "GET", path)[0] == 401
    messages = [
        getattr(record, "path", None) for record in caplog.records if record.message == "refused"
    ]
    assert messages == ["/v1/models", "/metrics", None, None]


def test_what_is_answered_is_no_line(open_server, caplog):
    caplog.set_level(logging.INFO, logger="jaxpage")
    assert (
        ask(open_server, "POST", COMPLETIONS, SHORT)[0]
        == ask(open_server, "GET", "/health")[0]
        == 200
    )
    assert not caplog.records


# What the paths say


def test_errors_quote_the_request_on_every_path(open_server):
    """A part that looks like something of the machine is shown, for the client has said it."""
    message = {"role": "user", "content": "x"}
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [message]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"max_tokens": 1, "messages": [message]}),
        ("/api/chat", {"messages": [message]}),
        ("/api/show", {}),
        ("/tokenize", {"prompt": "x"}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/rerank", {"query": "x", "documents": ["x"]}),
        ("/v1/score", {"prompt": "x", "continuation": "x"}),
        ("/v1/score", {"text_1": "x", "text_2": "x"}),
    ):
        status, _, answer = ask(open_server, "POST", path, {**body, "model": "/models/x"})
        assert status == 404 and b"/models/x" in answer, (path, answer)


def test_small_answers(open_server):
    assert json.loads(ask(open_server, "GET", "/health")[2]) == {"status": "ok"}
    assert json.loads(ask(open_server, "GET", "/ready")[2]) == {"status": "ready"}
    assert json.loads(ask(open_server, "GET", "/version")[2])["version"]
    paths = json.loads(ask(open_server, "GET", "/")[2])["paths"]
    assert COMPLETIONS in paths and len(paths) == len(set(paths))
    models = json.loads(ask(open_server, "GET", "/v1/models")[2])["data"]
    assert [model["id"] for model in models] == ["demo"] and models[0]["max_model_len"] == 512
    assert json.loads(ask(open_server, "GET", "/v1/models/demo")[2]) == models[0]
    assert b"jaxpage_num_blocks_free" in ask(open_server, "GET", "/metrics")[2]
    tokens = json.loads(
        ask(open_server, "POST", "/tokenize", {"model": "demo", "prompt": "Once"})[2]
    )["tokens"]
    assert (
        json.loads(ask(open_server, "POST", "/detokenize", {"model": "demo", "tokens": tokens})[2])[
            "prompt"
        ]
        == "Once"
    )


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/nothing", 404, "not_found"),
        ("GET", "//nothing", 404, "not_found"),
        ("GET", "/v1/", 404, "not_found"),
        ("GET", "/v1/../metrics", 404, "not_found"),
        ("GET", "/v1/%2e%2e/metrics", 404, "not_found"),
        ("GET", "/metrics/", 404, "not_found"),
        ("GET", "/debug/state", 404, "not_found"),
        ("GET", "/debug/events", 404, "not_found"),
        ("GET", "/ui/", 404, "not_found"),
        ("GET", "/v1/models/unknown", 404, "model_not_found"),
        ("GET", "/v1/models/../../etc/passwd", 404, "model_not_found"),
        ("GET", COMPLETIONS, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("OPTIONS", COMPLETIONS, 405, "method_not_allowed"),
        ("BREW", "/health", 405, "method_not_allowed"),
    ],
)
def test_what_is_not_there(open_server, method, path, status, code):
    answered, headers, body = ask(open_server, method, path)
    error = error_of(body)
    assert (
        answered == status and (code is None or error["code"] == code) and "location" not in headers
    )
    assert status != 405 or headers["allow"]


@pytest.mark.parametrize(
    "path", ["/v1//models", "//v1/models", "/v1/models/", "/v1/models//", "///v1///models"]
)
def test_slashes_too_many_are_passed_over(open_server, path):
    """Clients make them when they join a base URL and a path."""
    assert ask(open_server, "GET", path)[2] == ask(open_server, "GET", "/v1/models")[2]
    model_path = path.replace("models", "models/demo")
    assert json.loads(ask(open_server, "GET", model_path)[2])["id"] == "demo"
    posted = path.replace("models", "chat//completions")
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    assert ask(open_server, "POST", posted, body)[0] == 200


@pytest.mark.parametrize(
    "path", ["/v1/messages/batches", "/v1/messages/batches/x", "/v1/messages/x", "/v1/messages//x"]
)
def test_paths_below_messages_answer_in_anthropics_shape(open_server, path):
    for method in ("GET", "POST", "DELETE"):
        status, _, body = ask(open_server, method, path, {} if method == "POST" else None)
        error = json.loads(body)
        assert (status, error["type"], error["error"]["type"]) == (404, "error", "not_found_error")
    assert "type" not in json.loads(ask(open_server, "GET", "/v1/messagesx")[2])


def test_request_ids_are_echoed_or_made(open_server):
    assert (
        ask(open_server, "GET", "/health", X_Request_Id="mine-1.2_3")[1]["x-request-id"]
        == "mine-1.2_3"
    )
    for odd in ("x" * 129, "a b", "é", 'a"b', "a;b"):
        made = ask(open_server, "GET", "/health", X_Request_Id=odd)[1]["x-request-id"]
        assert re.fullmatch(r"[0-9a-f]{32}", made)
    _, headers, body = ask(
        open_server, "POST", COMPLETIONS, {**SHORT, "temprature": 1}, X_Request_Id="same"
    )
    assert (
        headers["x-jaxpage-ignored-fields"] == "temprature" and "same" not in json.loads(body)["id"]
    )
    assert headers["x-content-type-options"] == "nosniff" and "server" not in headers


# What a request may bring


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Content-Type": "application/json; charset=utf-16"}, 415),
        ({"Content-Encoding": "gzip"}, 415),
        ({"Content-Encoding": "identity, br"}, 415),
        *[
            ({"Content-Type": f"application/json{parameters}"}, 200)
            for parameters in (
                "; charset=UTF-8",
                ";charset=utf8",
                '; Charset = "UTF_8"',
                "; a=b; charset=csUTF8",
            )
        ],
        *[
            ({"Content-Type": f"application/json{parameters}"}, 415)
            for parameters in (
                "; charset=utf-16",
                "; charset=",
                "; charset=utf-80",
                "; charset=utf-8-sig",
                "; charset=utf-8; charset=latin1",
            )
        ],
        ({"Content-Encoding": "identity"}, 200),
    ],
)
def test_bodies_are_plain_json(open_server, headers, status):
    answered, _, body = ask(open_server, "POST", COMPLETIONS, {**SHORT, "max_tokens": 1}, **headers)
    assert answered == status and (
        status == 200 or error_of(body)["type"] == "invalid_request_error"
    )


def test_ollamas_paths_take_json_under_any_name_but_from_no_other_page(engines_server, open_server):
    """LiteLLM gives none, and curl its own.

    A page of another site could do that as well, but for its origin.
    """
    shown = {"model": "demo"}
    request = {**shown, "prompt": "a", "raw": True, "stream": False, "options": {"num_predict": 1}}
    kinds = [
        {"Content_Type": kind} for kind in ("application/x-www-form-urlencoded", "", "text/plain")
    ]
    for kind in kinds:
        for path, fields in (("/api/generate", request), ("/api/show", shown)):
            body = json.dumps(fields).encode()
            assert ask(open_server, "POST", path, body, **kind)[0] == 200
            assert ask(open_server, "POST", path, body, **kind, Content_Encoding="gzip")[0] == 415
    running = engines_server.get(host="0.0.0.0")
    foreign = {"Origin": "http://page.example", "Host": "model.example"}
    for kind in kinds:
        assert ask(running, "POST", "/api/show", body, **kind, **foreign)[0] == 403


def test_a_body_has_a_limit_with_and_without_a_length(demo_build):
    with serving(demo_build, max_body_bytes=2000) as running:
        fits = json.dumps(SHORT).encode().ljust(2000)
        assert ask(running, "POST", COMPLETIONS, fits)[0] == 200
        status, headers, body = ask(running, "POST", COMPLETIONS, fits + b" ")
        assert (
            status == 413
            and "2000 bytes" in error_of(body)["message"]
            and headers["connection"] == "close"
        )
        # it says that it is long, and nothing of it is waited for
        with running.connect() as client:
            client.sendall(request_bytes("POST", COMPLETIONS, b"{", Content_Length="1000000000"))
            assert answer_of(client)[0] == 413
        with running.connect() as client:
            client.sendall(
                request_bytes(
                    "POST", COMPLETIONS, b"", Content_Length="", Transfer_Encoding="chunked"
                )
            )
            for _ in range(3):
                client.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
            assert answer_of(client)[0] == 413
        assert running.metrics._rejected["too_large"] == 3


def test_headers_have_a_limit(open_server):
    many = {f"X-{number}": "1" for number in range(101)}
    status, _, body = ask(open_server, "GET", "/health", **many)
    assert status == 431 and "headers" in error_of(body)["message"]
    process = psutil.Process()
    before = process.memory_info().rss
    with open_server.connect() as client, contextlib.suppress(ConnectionError):
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        for number in range(3000):
            client.sendall(f"X-{number}: ".encode() + b"a" * 10_000 + b"\r\n")
        assert answer_of(client)[0] in (0, 400)
    assert process.memory_info().rss - before < 30_000_000
    assert ask(open_server, "GET", "/health")[0] == 200


def test_who_still_sends_what_is_not_http_gets_an_answer_and_is_not_waited_for(
    demo_build, monkeypatch
):
    """A connection that is closed with something unread is reset, and the answer with it."""
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.5)
    with serving(demo_build) as running, running.connect() as client:
        client.sendall(b"hello\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                client.sendall(b"z" * 100_000)
        assert answer_of(client)[0] == 400 and client.recv(1) == b""
        wait_until(lambda: not running.uvicorn.connections)  # though the client is still there


SMUGGLED = request_bytes("GET", "/version")
TWO_LENGTHS = [
    ("Content-Length: {}", "Transfer-Encoding: chunked"),
    ("Transfer-Encoding: chunked", "Content-Length: {}"),
]


@pytest.mark.parametrize("lengths", TWO_LENGTHS)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("body", [b"0\r\n\r\n", b"2\r\n{}\r\n0\r\n\r\n"])
def test_a_body_of_two_lengths_smuggles_no_request(open_server, lengths, version, body):
    """A proxy may go by either of the two (RFC 9112, 6.1)."""
    names = "\r\n".join(lengths).format(len(body + SMUGGLED))
    head = f"POST {COMPLETIONS} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n{names}\r\n\r\n"
    for pieces in ([head.encode() + body + SMUGGLED], [head.encode(), body, SMUGGLED]):
        with open_server.connect() as client:
            for piece in pieces:
                client.sendall(piece)
            answered = all_of(client)
        assert answered.count(b"HTTP/1.1 ") == 1 and b'"version"' not in answered
        assert (
            answered.startswith(b"HTTP/1.1 400 ")
            and b"Transfer-Encoding exclude each other" in answered
        )
        assert b"connection: close" in answered.lower()


def all_of(client: socket.socket) -> bytes:
    data = b""
    while part := client.recv(65536):
        data += part
    return data


ABSOLUTE = [
    "http://localhost{}",
    "HTTP://localhost:8000{}",
    "https://127.0.0.1{}",
    "http://[::1]:1{}",
]


def test_a_target_may_be_a_url(open_server):
    """The host in it is the one that counts (RFC 9112, 3.2.2), also for who may come in."""
    for form in ABSOLUTE:
        assert ask(open_server, "GET", form.format("/health"), Host="evil.example")[0] == 200
        assert ask(open_server, "GET", form.format("/v1/models/demo?x=/y"))[0] == 200
        assert ask(open_server, "GET", form.format("/nothing"))[0] == 404
        assert COMPLETIONS in json.loads(ask(open_server, "GET", form.format(""))[2])["paths"]
        assert COMPLETIONS in json.loads(ask(open_server, "GET", form.format("?x"))[2])["paths"]
    status, _, body = ask(open_server, "POST", f"http://localhost{COMPLETIONS}", SHORT)
    assert status == 200 and json.loads(body)["choices"]
    for host in ("evil.example", "localhost.evil.example:80", "health"):
        status, _, body = ask(open_server, "GET", f"http://{host}/health", Host="localhost")
        assert status == 403 and error_of(body)["code"] == "foreign_host"
    for target in (
        "http:///health",
        "http://a@localhost/health",
        "http://localhost@evil.example/health",
    ):
        assert ask(open_server, "GET", target)[0] == 400


def test_a_key_is_requested_on_the_path_of_a_url(server_with_keys):
    for form in (*ABSOLUTE, "http://x/health/..{}", "http://health{}"):
        for path in LOOKED_AT[:-1]:
            assert ask(server_with_keys, "GET", form.format(path))[0] == 401, (form, path)
    for path in ("/health", "/ready", "/ui/"):
        assert ask(server_with_keys, "GET", f"http://x{path}")[0] == 200
    assert ask(server_with_keys, "GET", "http://x?/v1/models")[0] == 307, (
        "the path is /, which leads to the page"
    )
    for target in (
        "ftp://x/health",
        "/http://x/health",
        "http://x//health",
        "http:/health",
        "x://health",
        "http:health",
    ):
        assert ask(server_with_keys, "GET", target)[0] == 401, target
    assert (
        ask(server_with_keys, "GET", "http://x/v1/models", Authorization=f"Bearer {KEY}")[0] == 200
    )


def test_a_key_is_requested_whatever_the_slashes(server_with_keys):
    for path in ("/v1//models", "//v1/models/", "/v1/messages//batches"):
        assert ask(server_with_keys, "GET", path)[0] == 401
    status, _, body = ask(server_with_keys, "GET", "/v1/messages/batches")
    assert (status, json.loads(body)["error"]["type"]) == (401, "authentication_error")
    assert ask(server_with_keys, "GET", "/v1/messages/batches", x_api_key=KEY)[0] == 404


def test_a_body_in_chunks_needs_http_1_1(open_server):
    """HTTP/1.0 has none (RFC 9112, 6.1): a proxy of that age would take the chunks for the next
    request.
    """
    for version, status in (("1.0", 400), ("1.1", 200)):
        with open_server.connect() as client:
            head = f"POST {COMPLETIONS} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            body = json.dumps(SHORT).encode()
            chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
            client.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks)
            assert answer_of(client)[0] == status


@pytest.mark.parametrize("empty", [b"\r\n", b"\r\n\r\n\n", b"\n"])
def test_empty_lines_before_a_request_are_skipped(open_server, empty):
    """Old clients send one behind a body (RFC 9112, 2.2), in whatever pieces it comes."""
    requested = request_bytes("POST", COMPLETIONS, SHORT) + empty
    with open_server.connect() as client:
        client.sendall(empty + requested)
        assert answer_of(client)[0] == 200
        for piece in (
            empty[:1],
            empty[1:],
            request_bytes("GET", "/health")[:9],
            request_bytes("GET", "/health")[9:],
        ):
            client.sendall(piece)
            time.sleep(0.01)  # so that it comes by itself, mostly
        assert json.loads(answer_of(client)[2]) == {"status": "ok"}
    with open_server.connect() as client:
        client.sendall(empty + b"\rGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer_of(client)[0] == 400


# Who is slow


def test_slow_senders_lose_their_connection(demo_build, monkeypatch):
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.3)
    with serving(demo_build, body_timeout_seconds=0.3) as running:
        with running.connect() as client:  # the body stops in the middle
            client.sendall(request_bytes("POST", COMPLETIONS, b"{", Content_Length="100"))
            status, headers, body = answer_of(client)
            assert (
                status == 408
                and "0.3 s" in error_of(body)["message"]
                and headers["connection"] == "close"
            )
            assert client.recv(1) == b""
        for beginning in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"):
            # headers that never end; they may come in small pieces
            with running.connect() as client:
                client.sendall(beginning)
                with contextlib.suppress(ConnectionError):
                    for _ in range(600):
                        if beginning:
                            client.sendall(b"X-A: b\r\n" if beginning.endswith(b"\n") else b"")
                        client.settimeout(0.1)
                        with contextlib.suppress(TimeoutError):
                            assert client.recv(1) == b""
                            break
                    else:
                        raise AssertionError("still connected")
        wait_until(lambda: not running.uvicorn.connections)
        assert ask(running, "GET", "/health")[0] == 200


def test_who_does_not_read_is_cut_and_ends_nothing_but_itself(demo_build):
    """The buffers of the sockets are small, so that a stream is soon held up."""
    with serving(demo_build, slow_reader_seconds=1.0, send_buffer=4096) as running:
        expected = reference(running)
        with running.connect(receive_buffer=4096) as client:
            client.sendall(
                request_bytes("POST", COMPLETIONS, {**LONG, "stream": True, "logprobs": 5})
            )
            assert reference(running) == expected  # meanwhile
            wait_until(lambda: running.aborted() == {"slow_reader": 1} and nothing_runs(running))
        whole = {**LONG, "logprobs": 5}
        with running.connect(receive_buffer=4096) as client:
            client.sendall(request_bytes("POST", COMPLETIONS, whole))
            wait_until(lambda: running.uvicorn.total_requests >= 3)
            wait_until(lambda: not running.uvicorn.connections)
        # who reads all the time, however slowly, gets everything
        with running.connect(receive_buffer=4096) as client:
            client.sendall(
                request_bytes("POST", COMPLETIONS, {**whole, "max_tokens": 150}, Connection="close")
            )
            data = b""
            while part := client.recv(2048):
                data += part
                time.sleep(0.05)
            assert (
                len(json.loads(data.partition(b"\r\n\r\n")[2])["choices"][0]["logprobs"]["tokens"])
                == 150
            )


def test_a_stream_that_is_silent_says_that_it_lives(demo_build, monkeypatch):
    with serving(demo_build, sse_keep_alive_seconds=0.05) as running:
        gate = Gate(monkeypatch, demo_build.engine)
        with running.connect() as client, client.makefile("rb") as lines:
            client.sendall(request_bytes("POST", COMPLETIONS, {**SHORT, "stream": True}))
            for line in lines:
                if line.startswith(b": keep-alive"):
                    break
            gate.open()
            assert any(line.startswith(b"data: [DONE]") for line in lines)


def test_a_stream_says_how_much_of_its_prompt_is_computed(demo_build, monkeypatch):
    monkeypatch.setattr(generating, "PROGRESS_SECONDS", 0.01)
    message = {"role": "user", "content": "Once upon a time there was a cat. " * 14}
    body = {"model": "demo", "messages": [message], "max_tokens": 2, "return_progress": True}
    options = {"include_usage": True}
    messages = []

    def read_progress(line):
        if b"prompt_progress" in line:
            messages.append(json.loads(line.removeprefix(b"data: "))["prompt_progress"])

    with serving(demo_build) as running:
        gate = Gate(monkeypatch, demo_build.engine)
        with running.connect() as client, client.makefile("rb") as lines:
            requested = {**body, "stream": True, "stream_options": options}
            client.sendall(request_bytes("POST", "/v1/chat/completions", requested))
            gate.entered.acquire()
            gate.permits.release()
            gate.entered.acquire()  # one step was taken, and the next one waits
            while not messages:
                read_progress(lines.readline())
            gate.open()
            for line in lines:
                read_progress(line)
                if b'"usage":{' in line:
                    num_tokens = json.loads(line.removeprefix(b"data: "))["usage"]["prompt_tokens"]
                if line.startswith(b"data: [DONE]"):
                    break
    processed = [progress["processed"] for progress in messages]
    assert processed[0] < num_tokens and processed == sorted(set(processed))
    assert processed[-1] == num_tokens and {progress["total"] for progress in messages} == {
        num_tokens
    }


# Who leaves


@pytest.mark.parametrize("after", [b"x", b"\r\n", request_bytes("GET", "/health"), b"z" * 60_000])
def test_who_sends_more_and_leaves_has_left(demo_build, monkeypatch, after):
    """A further request is read later; that nobody sends any more is seen at once."""
    with serving(demo_build) as running:
        gate = Gate(monkeypatch, demo_build.engine)
        with running.connect() as client:
            client.sendall(request_bytes("POST", COMPLETIONS, LONG) + after)
            gate.entered.acquire()
        wait_until(lambda: not running.server.visitors._number)
        gate.permits.release()
        wait_until(lambda: nothing_runs(running))
        assert running.aborted() == {"disconnect": 1}


def test_what_stands_after_the_last_request_is_dropped(demo_build, monkeypatch):
    """RFC 9112, 9.6 says so."""
    with serving(demo_build) as running:
        expected = reference(running)
        gate = Gate(monkeypatch, demo_build.engine)
        with running.connect() as client:
            client.sendall(request_bytes("POST", COMPLETIONS, SHORT, Connection="close"))
            gate.entered.acquire()
            client.sendall(b"\r\n" + request_bytes("GET", "/version"))
            wait_until(
                lambda: any(connection._num_dropped for connection in running.uvicorn.connections)
            )
            gate.open()
            answered = all_of(client)
        assert answered.count(b"HTTP/1.1 ") == 1 and expected.encode() in answered


@pytest.mark.parametrize("stream", [False, True])
def test_far_too_much_after_a_request_is_dropped_and_its_answer_is_the_last(
    demo_build, monkeypatch, stream
):
    body = {**SHORT, "stream": stream}
    with serving(demo_build) as running:
        expected = reference(running)
        gate = Gate(monkeypatch, demo_build.engine)
        with running.connect() as client:
            client.sendall(request_bytes("POST", COMPLETIONS, body))
            gate.entered.acquire()
            client.sendall(b"z" * 70_000)
            wait_until(lambda: all(connection._drops for connection in running.uvicorn.connections))
            client.sendall(b"z" * 500_000 + request_bytes("GET", "/version"))
            gate.open()
            answer = HTTPResponse(client)
            answer.begin()
            text = answer.read().decode()
            assert answer.status == 200 and client.recv(1) == b""
            assert stream or (
                json.loads(text)["choices"][0]["text"],
                answer.headers["connection"],
            ) == (
                expected,
                "close",
            )
            assert not stream or text.endswith("data: [DONE]\n\n")
        wait_until(lambda: nothing_runs(running) and not running.uvicorn.connections)
        assert running.aborted() == {}


def test_who_sends_without_end_after_a_request_is_cut(demo_build, monkeypatch):
    monkeypatch.setattr(connection, "MAX_BYTES_DROPPED", 1 << 20)
    with serving(demo_build) as running:
        gate = Gate(monkeypatch, demo_build.engine)
        with running.connect() as client:
            client.sendall(request_bytes("POST", COMPLETIONS, LONG))
            gate.entered.acquire()
            with pytest.raises(ConnectionError):
                for _ in range(1000):
                    client.sendall(b"z" * 70_000)
            wait_until(lambda: not running.server.visitors._number)
        gate.permits.release()
        wait_until(lambda: nothing_runs(running))


# Who only stops sending


@pytest.mark.parametrize("stream", [False, True])
def test_who_sends_no_more_gets_an_answer(demo_build, monkeypatch, stream):
    """The server looks whether it is there: it gets an interim answer, or the comment of a stream,
    before the answer goes on.
    """
    with serving(demo_build) as running:
        expected = reference(running)
        gate = Gate(monkeypatch, demo_build.engine)
        with running.connect() as client:
            client.sendall(request_bytes("POST", COMPLETIONS, {**SHORT, "stream": stream}))
            client.shutdown(socket.SHUT_WR)
            gate.entered.acquire()
            looked_for = b": keep-alive" if stream else b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 100"
            wait_until(lambda: looked_for in client.recv(65536, socket.MSG_PEEK))
            gate.open()
            answer = HTTPResponse(client)
            answer.begin()
            text = answer.read().decode()
            assert answer.status == 200 and client.recv(1) == b""
        if stream:
            events = [
                json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")
            ]
            assert "".join(event["choices"][0]["text"] for event in events) == expected
            assert text.endswith("data: [DONE]\n\n")
        else:
            assert json.loads(text)["choices"][0]["text"] == expected
        assert running.aborted() == {}
        wait_until(lambda: nothing_runs(running) and not running.uvicorn.connections)


def test_requests_after_each_other_are_all_answered_after_the_end_of_them(demo_build, monkeypatch):
    with serving(demo_build) as running:
        expected = reference(running)
        gate = Gate(monkeypatch, demo_build.engine)
        requested = request_bytes("POST", COMPLETIONS, SHORT)
        # the last one is half there, and nobody waits for it
        for sent in (b"", requested[:40], requested[:-5]):
            with running.connect() as client:
                client.sendall(requested + request_bytes("GET", "/version") + requested + sent)
                client.shutdown(socket.SHUT_WR)
                gate.entered.acquire()
                gate.open()
                answers = b"".join(re.split(rb"HTTP/1.1 100 Continue\r\n\r\n", all_of(client)))
            assert answers.count(b"HTTP/1.1 ") == answers.count(b"HTTP/1.1 200 ") == 3
            assert answers.count(expected.encode()) == 2 and answers.count(b'"version"') == 1
            wait_until(lambda: nothing_runs(running) and not running.uvicorn.connections)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_who_stops_sending_and_then_leaves_has_left(demo_build, monkeypatch, stream, version):
    """The server has read everything so far, so that nothing but a look tells.

    With HTTP/1.0, which has no interim answers, the end is enough.
    """
    raw = request_bytes("POST", COMPLETIONS, {**LONG, "stream": stream}).replace(
        b"HTTP/1.1", b"HTTP/" + version.encode()
    )
    with serving(demo_build) as running:
        gate = Gate(monkeypatch, demo_build.engine)
        with running.connect() as client:
            client.sendall(raw)
            gate.entered.acquire()
            client.shutdown(socket.SHUT_WR)
            if stream or version == "1.1":
                assert client.recv(65536)
            else:
                assert client.recv(1) == b""
        wait_until(lambda: not running.server.visitors._number)
        before = gate.num_steps
        gate.permits.release()  # the step that is under way
        wait_until(lambda: nothing_runs(running))
        assert gate.num_steps == before + 1 and running.aborted() == {"disconnect": 1}


class Reading:
    """Stands before the reading of bodies."""

    def __init__(self, monkeypatch):
        self.begun, self._goes_on, self._parse = [], threading.Event(), app.parse_object
        monkeypatch.setattr(app, "parse_object", self.parse)

    def parse(self, raw):
        self.begun.append(raw)
        self._goes_on.wait()
        return self._parse(raw)

    def open(self):
        self._goes_on.set()


@pytest.mark.parametrize(("path", "num_threads"), [(COMPLETIONS, 2), ("/tokenize", 1)])
def test_what_waits_to_be_read_is_dropped_when_its_client_leaves(
    demo_build, monkeypatch, path, num_threads
):
    reading = Reading(monkeypatch)
    raw = request_bytes("POST", path, SHORT if path == COMPLETIONS else {"prompt": "Once"})
    with serving(demo_build) as running, contextlib.ExitStack() as clients:
        clients.callback(reading.open)
        first = [clients.enter_context(running.connect()) for _ in range(num_threads)]
        for client in first:
            client.sendall(raw)
        wait_until(lambda: len(reading.begun) == num_threads)
        others = [running.connect() for _ in range(5)]
        for other in others:
            other.sendall(raw)
            other.close()
        wait_until(lambda: running.aborted() == {"disconnect": 5})  # while nobody has been answered
        reading.open()
        assert [answer_of(client)[0] for client in first] == [200] * num_threads
        assert len(reading.begun) == num_threads


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
def test_the_time_of_a_request_is_over_while_it_waits_to_be_read(demo_build, monkeypatch, path):
    reading = Reading(monkeypatch)
    with (
        serving(demo_build, request_timeout_seconds=0.2) as running,
        contextlib.ExitStack() as clients,
    ):
        clients.callback(reading.open)
        for _ in range(4):
            client = clients.enter_context(running.connect())
            client.sendall(request_bytes("POST", path, {**SHORT, "prompt": "Once"}))
            status, _, body = answer_of(client)
            assert status == 504 and "0.2 s" in error_of(body)["message"]
        assert len(reading.begun) < 4
        assert path != COMPLETIONS or running.aborted() == {"deadline": 4}
        reading.open()
        wait_until(lambda: nothing_runs(running))


def test_known_grammars_do_not_queue_and_the_queue_has_an_end(demo_build, monkeypatch):
    known, refused, first, other = (
        {**SHORT, "structured_outputs": {"regex": regex}}
        for regex in ("[a-c]{3}", "(", "[d-f]{3}", "[g-i]{3}")
    )
    begun, goes_on, compiled = (
        threading.Event(),
        threading.Event(),
        demo_build.engine.compile_grammar,
    )

    def hold(params):
        begun.set()
        goes_on.wait()
        return compiled(params)

    with serving(demo_build) as running:
        assert [ask(running, "POST", COMPLETIONS, body)[0] for body in (known, refused)] == [
            200,
            400,
        ]
        monkeypatch.setattr(demo_build.engine, "compile_grammar", hold)
        with running.connect() as first_connection, running.connect() as next_one:
            first_connection.sendall(request_bytes("POST", COMPLETIONS, first))
            begun.wait()
            monkeypatch.setattr(preparing, "GRAMMAR_QUEUE_SECONDS", 0.0)
            next_one.sendall(request_bytes("POST", COMPLETIONS, other))
            try:
                assert [
                    ask(running, "POST", COMPLETIONS, body)[0] for body in (known, refused)
                ] == [200, 400]
            finally:
                goes_on.set()
            assert answer_of(first_connection)[0] == 200
            status, _, body = answer_of(next_one)
            assert status == 503 and "waiting for the grammar compiler" in error_of(body)["message"]


def test_parameters_are_checked_once_and_nothing_is_tokenized_on_the_engines_thread(
    demo_build, monkeypatch
):
    """Many prompts share them, with more lists of bad words than any cache of tokens would hold."""
    check_params, checked, encoding = Admission.check_params, [], set()
    kinds = {type(demo_build.tokenizer), type(whole_tokenizer(demo_build.tokenizer))}
    encode = {kind: kind.__call__ for kind in kinds}

    def watch_check(self, params):
        checked.append(threading.current_thread().name)
        return check_params(self, params)

    def watch_encode(self, *args, **kwargs):
        encoding.add(threading.current_thread().name)
        return encode[type(self)](self, *args, **kwargs)

    monkeypatch.setattr(Admission, "check_params", watch_check)
    for kind in kinds:
        monkeypatch.setattr(kind, "__call__", watch_encode)
    short_body = {**SHORT, "max_tokens": 1}
    body = {**short_body, "prompt": ["a"] * 40, "stop_token_ids": [7] * 2000}
    with serving(demo_build) as running:
        assert ask(running, "POST", COMPLETIONS, {**body, "bad_words": ["fox", "fox"]})[0] == 200
        assert len(checked) == 1
        for word in range(70):
            assert (
                ask(running, "POST", COMPLETIONS, {**short_body, "bad_words": [f"fox{word}"]})[0]
                == 200
            )
    assert encoding and all("jaxpage-reading" in name for name in (*checked, *encoding))


# Who is one too many, or too late


def put_in_flight(running, gate, whole, streamed):
    """Puts a request and a streamed one, whose answer has begun, into the engine.

    It is held at its next step.
    """
    whole.sendall(request_bytes("POST", COMPLETIONS, SHORT))
    gate.entered.acquire()
    streamed.sendall(
        request_bytes("POST", COMPLETIONS, {**SHORT, "stream": True}, Connection="close")
    )
    wait_until(lambda: running.loop.turns.inbox.qsize())
    gate.permits.release()
    gate.entered.acquire()
    assert streamed.recv(1, socket.MSG_PEEK)


def test_a_request_that_takes_too_long(demo_build, monkeypatch):
    with serving(demo_build) as running:
        reference(running)  # compiles the steps, which may take more than the time below
    with serving(demo_build, request_timeout_seconds=3) as running:
        gate = Gate(monkeypatch, demo_build.engine)
        with running.connect() as whole, running.connect() as streamed:
            put_in_flight(running, gate, whole, streamed)
            time.sleep(3)  # the time that they have
            gate.open()
            status, _, body = answer_of(whole)
            assert status == 504 and "3 s" in error_of(body)["message"]
            status, _, body = answer_of(streamed)
            events = re.findall(rb"data: (.*)\r?\n", body)
            assert status == 200 and b"3 s" in events[-2] and events[-1] == b"[DONE]"
        wait_until(lambda: nothing_runs(running))
        assert running.aborted() == {"deadline": 2}


def test_no_part_of_an_answer_waits_for_an_acknowledgement_of_the_one_before(demo_build):
    with serving(demo_build) as running, running.connect():
        wait_until(lambda: running.uvicorn.connections)
        (connection,) = running.uvicorn.connections
        held = connection.transport.get_extra_info("socket")
        assert held.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_there_are_so_many_connections_and_no_more(demo_build):
    with serving(demo_build, max_connections=3) as running:
        idle = [running.connect() for _ in range(3)]
        wait_until(lambda: len(running.uvicorn.connections) == 3)
        assert ask(running, "GET", "/health")[0] == 200, (
            "who only holds a place loses it to who asks something"
        )
        assert idle[0].recv(1) == b""
        wait_until(lambda: len(running.uvicorn.connections) == 2)
        held = [running.connect() for _ in range(3)]
        for client in held:
            client.sendall(b"GET /health HTTP/1.1\r\n")
        wait_until(lambda: sum(not each.is_idle for each in running.uvicorn.connections) == 3)
        wait_until(lambda: len(running.uvicorn.connections) == 3)
        status, headers, body = ask(running, "GET", "/health")
        assert (
            status == 503 and headers["retry-after"] and "connections" in error_of(body)["message"]
        )
        assert running.rejected() == {"too_many_connections": 1}
        held += [running.connect() for _ in range(6)]
        wait_until(lambda: sum(not each.is_idle for each in running.uvicorn.connections) == 3)
        assert len(running.uvicorn.connections) <= 6
        for client in (*held, *idle):
            client.close()
        wait_until(lambda: not running.uvicorn.connections)
        assert ask(running, "GET", "/health")[0] == 200


def test_the_client_with_most_connections_loses_one_first(demo_build, monkeypatch):
    """The oldest of all stays if it is the only one of its address."""
    with serving(demo_build, max_connections=3) as running:
        host, _, port = running.address.removeprefix("http://").partition(":")

        def connect(source):
            return socket.create_connection((host, int(port)), 10, source_address=(source, 0))

        held = [connect("127.0.0.2"), connect("127.0.0.3"), connect("127.0.0.3")]
        wait_until(lambda: len(running.uvicorn.connections) == 3)
        assert ask(running, "GET", "/health")[0] == 200
        assert held[1].recv(1) == b""
        wait_until(lambda: len(running.uvicorn.connections) == 2)
        for client in held:
            client.close()


def test_memory_is_given_back_after_large_bodies(demo_build, monkeypatch):
    """It is given back whether they are taken or refused, and not after each small one."""
    values = []
    monkeypatch.setattr(request_limits, "give_memory_back", lambda: values.append(1))
    with serving(demo_build, max_body_bytes=4 << 20) as running:
        for body, status, number in (
            (json.dumps(SHORT).encode(), 200, 0),
            (json.dumps(SHORT).encode().ljust(2 << 20), 200, 1),
            (b"{".ljust(2 << 20), 400, 2),
        ):
            assert ask(running, "POST", COMPLETIONS, body)[0] == status
            wait_until(lambda number=number: len(values) >= number)
            assert len(values) == number


@pytest.mark.parametrize(
    ("soft", "hard", "room", "raised"),
    [(256, 4096, 1024, 2176), (256, 1024, 448, 1024), (4096, 4096, 1024, 4096)],
)
def test_as_many_connections_as_there_may_be_files(soft, hard, room, raised, monkeypatch, caplog):
    allowed = [soft, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(allowed))
    monkeypatch.setattr(
        resource, "setrlimit", lambda _, limits: allowed.__setitem__(slice(None), limits)
    )
    assert room_for_connections(1024) == room and allowed == [raised, hard]
    assert [record.message[:26] for record in caplog.records] == (
        ["max_connections is 448, no"] if room < 1024 else []
    )


def test_connections_that_cannot_be_accepted_are_a_line_a_second(caplog):
    loop, complaints, others = asyncio.new_event_loop(), Complaints(), []
    loop.default_exception_handler = others.append
    for _ in range(1000):
        complaints(
            loop,
            {
                "message": "socket.accept() out of system resource",
                "exception": OSError(errno.EMFILE, "Too many open files"),
            },
        )
    complaints(loop, {"message": "another"})
    loop.close()
    assert [record.getMessage() for record in caplog.records] == [
        "connections cannot be accepted: Too many open files"
    ]
    assert not caplog.records[0].exc_info and others == [{"message": "another"}]


def test_bodies_share_a_budget(demo_build, monkeypatch):
    """All connections share it; a request that is answered gives its part back."""
    monkeypatch.setattr(request_limits, "NUM_LARGEST_BODIES", 2)
    with serving(demo_build, max_body_bytes=4096) as running:
        body = json.dumps({**SHORT, "user": "x" * 64}).encode().ljust(4000)
        requested = request_bytes("POST", COMPLETIONS, body)
        held = [running.connect() for _ in range(2)]
        for client in held:
            client.sendall(requested[:-10])
        wait_until(
            lambda: (
                sum(each.conn.their_state is h11.SEND_BODY for each in running.uvicorn.connections)
                == 2
            )
        )
        time.sleep(0.2)  # until what came is read
        status, headers, answer = ask(running, "POST", COMPLETIONS, body)
        assert status == 503 and headers["retry-after"] and "bodies" in error_of(answer)["message"]
        for client in held:
            client.sendall(requested[-10:])
            assert answer_of(client)[0] == 200
            client.close()
        assert ask(running, "POST", COMPLETIONS, body)[0] == 200


LET_GO = [
    (COMPLETIONS, {}, 400),
    (COMPLETIONS, {**SHORT, "model": "another"}, 404),
    (COMPLETIONS, {**SHORT, "prompt": [2**20]}, 400),
    ("/v1/embeddings", {"model": "demo", "input": []}, 400),
    ("/v1/score", {"model": "demo", "prompt": "x"}, 400),
    ("/tokenize", {"prompt": 1}, 400),
    ("/api/chat", {"model": "another"}, 404),
    (COMPLETIONS, SHORT, 200),
    (COMPLETIONS, {**SHORT, "stream": True}, 200),
    ("/v1/embeddings", {"model": "demo", "input": [1]}, 200),
]


def test_a_body_is_let_go_of_without_the_garbage_collector(open_server):
    def hold() -> list[str]:
        dicts = (each for each in gc.get_objects() if type(each) is dict)
        return [mark for each in dicts for mark in marks if mark in each]

    marks = {f"field {number}" for number in range(len(LET_GO))}
    gc.collect()
    gc.disable()
    try:
        for number, (path, fields, status) in enumerate(LET_GO):
            body = {**fields, f"field {number}": [[]]}
            assert ask(open_server, "POST", path, body)[0] == status
        del body
        wait_until(lambda: not hold(), "they are gone", 5)
    finally:
        gc.enable()


def test_a_tokenizer_that_gives_up_is_a_refusal(demo_build, caplog):
    """A regular expression of tokenizer.json that backtracks ends in a panic of Rust, which is no
    Exception.
    """
    tokenizers = (demo_build.engine.tokenizer, whole_tokenizer(demo_build.tokenizer))
    backends = [tokenizer.backend_tokenizer for tokenizer in tokenizers]
    usual = [backend.pre_tokenizer for backend in backends]
    for backend in backends:
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
    try:
        with serving(demo_build) as running:
            for path, fields in (
                (COMPLETIONS, {"prompt": "a" * 40}),
                ("/tokenize", {"prompt": "a" * 40}),
                ("/v1/embeddings", {"input": "a" * 40}),
                ("/v1/score", {"prompt": "a" * 40, "continuation": "a"}),
            ):
                status, _, answer = ask(running, "POST", path, {"model": "demo", **fields})
                assert status == 400, path
                assert "gives up on this text" in error_of(answer)["message"]
    finally:
        for backend, pre_tokenizer in zip(backends, usual, strict=True):
            backend.pre_tokenizer = pre_tokenizer
    assert not [record for record in caplog.records if record.exc_info]
    assert all(len(record.getMessage()) < 400 for record in caplog.records)


# What is long


def test_a_long_answer_is_written_while_others_are_answered(demo_build, monkeypatch):
    """It takes as long as it takes, and the event loop goes on."""
    begun, goes_on, whole = threading.Event(), threading.Event(), completions.CompletionAnswer.whole

    def slow(self, outputs):
        begun.set()
        goes_on.wait()
        return whole(self, outputs)

    with serving(demo_build) as running:
        monkeypatch.setattr(completions.CompletionAnswer, "whole", slow)
        with running.connect() as client:
            client.sendall(request_bytes("POST", COMPLETIONS, SHORT))
            begun.wait()
            try:
                assert ask(running, "GET", "/health")[0] == 200
            finally:
                goes_on.set()
            assert answer_of(client)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_logprobs_have_a_limit_for_all_prompts_together(open_server, monkeypatch, stream):
    requested = {**SHORT, "prompt": [[5] * 10, [6] * 10], "max_tokens": 1, "n": 2, "temperature": 1}
    requested |= {"echo": True, "logprobs": 4, "stream": True} if stream else {"prompt_logprobs": 4}
    monkeypatch.setattr(generating, "MAX_PROMPT_LOGPROBS", 200)
    status, _, body = ask(open_server, "POST", COMPLETIONS, requested)
    assert status == 200 and body.count(b"logprobs") >= 2
    monkeypatch.setattr(generating, "MAX_PROMPT_LOGPROBS", 199)
    status, _, body = ask(open_server, "POST", COMPLETIONS, requested)
    error = error_of(body)
    assert status == 400 and error["param"] in ("prompt_logprobs", "logprobs")
    assert "have 200" in error["message"] and "at most 199" in error["message"]


# What fails


def test_when_the_engine_dies_the_server_says_so_and_ends(demo_build, monkeypatch):
    with serving(demo_build) as running:
        gate = Gate(monkeypatch, demo_build.engine)
        with (
            running.connect() as whole,
            running.connect() as streamed,
            running.connect() as looking,
        ):
            put_in_flight(running, gate, whole, streamed)
            monkeypatch.setattr(gate, "_step", lambda: (_ for _ in ()).throw(SystemExit("planted")))
            gate.open()
            assert answer_of(whole)[0] == 500
            status, _, body = answer_of(streamed)
            assert status == 500 or (b'"error"' in body and b"data: [DONE]" in body)
            with contextlib.suppress(ConnectionError):
                looking.sendall(request_bytes("GET", "/health"))
                assert answer_of(looking)[0] in (0, 503)
        running.thread.join()
        assert running.status == 1 and not running.loop.healthy
    demo_build.engine.abort_all()


def test_an_answer_that_cannot_be_made_is_a_fixed_text(demo_build, monkeypatch, caplog):
    with serving(demo_build) as running:

        def failing(*_):
            raise KeyError(f"{__file__}, secret at 0x7f")

        monkeypatch.setattr(generating.Generating, "_stream", failing)
        status, _, body = ask(running, "POST", COMPLETIONS, {**SHORT, "stream": True})
        assert status == 500 and "secret" not in error_of(body)["message"]
        assert "secret" in caplog.text  # for who runs the server
        wait_until(lambda: nothing_runs(running))


# One for all


# How it ends


def test_a_drain_finishes_what_runs_and_refuses_the_rest(demo_build, monkeypatch):
    with serving(demo_build) as running:
        expected = reference(running)
        gate = Gate(monkeypatch, demo_build.engine)
        with running.connect() as first, running.connect() as late, running.connect() as looking:
            first.sendall(request_bytes("POST", COMPLETIONS, SHORT))
            gate.entered.acquire()
            running.signal()
            wait_until(lambda: running.server.visitors.is_closed)
            late.sendall(request_bytes("POST", COMPLETIONS, SHORT))
            status, headers, body = answer_of(late)
            assert status == 503 and headers["retry-after"] and error_of(body)
            looking.sendall(request_bytes("GET", "/ready"))
            assert answer_of(looking)[0] == 503
            looking.sendall(request_bytes("GET", "/health"))
            assert answer_of(looking)[0] == 200  # it is well, and on its way out
            gate.open()
            assert json.loads(answer_of(first)[2])["choices"][0]["text"] == expected
        running.thread.join()
        assert running.status == 0
        with pytest.raises(ConnectionRefusedError):
            running.connect()


def test_what_does_not_finish_in_time_is_answered_so(demo_build):
    with serving(demo_build, shutdown_timeout_seconds=0) as running:
        with (
            running.connect() as streamed,
            running.connect() as whole,
            streamed.makefile("rb") as lines,
        ):
            whole.sendall(request_bytes("POST", COMPLETIONS, LONG))
            streamed.sendall(request_bytes("POST", COMPLETIONS, {**LONG, "stream": True}))
            for line in lines:
                if line.startswith(b"data: "):
                    break
            wait_until(lambda: running.loop.num_open == 2)
            running.signal()
            events = [line for line in lines if line.startswith(b"data: ")]
            assert b'"error"' in events[-2] and events[-1].startswith(b"data: [DONE]")
            assert answer_of(whole)[0] == 503
        running.thread.join()
        assert running.status == 0 and running.aborted() == {"shutdown": 2}


# ---- a Unix socket, a prefix of the paths, idle connections


def test_a_server_on_a_unix_socket_answers_there_and_leaves_no_file(demo_build, tmp_path):
    path = tmp_path / "jaxpage.sock"
    with serving(demo_build, uds=str(path)) as running:
        assert running.address == f"unix:{path}"
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://llm.example", timeout=60
        ) as client:
            # The name of the host is the proxy's.
            first = client.post(COMPLETIONS, json=SHORT).json()["choices"]
            assert client.post(COMPLETIONS, json=SHORT).json()["choices"] == first
            assert client.get("/health").status_code == 200
            with client.stream("POST", COMPLETIONS, json={**SHORT, "stream": True}) as answer:
                assert "data: [DONE]" in list(answer.iter_lines())
        with (
            pytest.raises(ConfigError, match="another server uses it"),
            bind_socket(ServerConfig(uds=str(path))),
        ):
            pass
        assert not running.errors
    assert [file.name for file in tmp_path.iterdir()] == ["jaxpage.sock.lock"]


def test_paths_may_have_the_prefix_of_a_proxy_or_not(demo_build):
    with serving(demo_build, root_path="/llm/a", api_keys=(KEY,), ui=True) as running:
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=running.address, timeout=60) as client:
            for prefix in ("", "/llm/a"):
                answer = client.post(f"{prefix}{COMPLETIONS}", json=SHORT, headers=headers)
                assert answer.status_code == 200, answer.text
                assert client.post(f"{prefix}/v1/messages", json={}).json()["type"] == "error"
                assert client.post(f"{prefix}{COMPLETIONS}", json=SHORT).status_code == 401
                assert client.get(f"{prefix}/health").status_code == 200
                assert client.get(f"{prefix}/ui", follow_redirects=True).status_code == 200
            assert client.get("/llm/a/", headers=headers, follow_redirects=True).status_code == 200
            for wrong in ("/llm/a", "/llm/av1/models", "/llm/v1/models", "/llm/a/llm/a/v1/models"):
                assert client.get(wrong, headers=headers).status_code == 404, wrong


def test_idle_connections_stay_as_long_as_those_of_proxies(demo_build):
    """Proxies keep theirs for 60 to 90 seconds, and send into one that the server closes."""
    for settings, seconds in (({}, 75), ({"keep_alive_seconds": 3}, 3)):
        with serving(demo_build, **settings) as running:
            assert running._serving._uvicorn.config.timeout_keep_alive == seconds


def test_what_one_model_does_not_have_is_said(open_server):
    for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
        status, _, content = ask(open_server, method, path)
        assert status == 404 and "jaxpage serve --models FILE" in error_of(content)["message"]
    said = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    for path, body in (("/v1/completions", SHORT), ("/api/chat", said), ("/v1/messages", said)):
        status, _, content = ask(open_server, "POST", path, {**body, "model": "demmo"})
        assert status == 404 and b"did you mean 'demo'?" in content, content
    assert b"this server has 'demo'" in ask(open_server, "GET", "/v1/models/quite-another")[2]
