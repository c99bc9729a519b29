"""The flaws that servers of language models were found to have (SECURITY.md names them), tried on
this one.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import json
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxpage.decoding import grammar_compiler
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.wire import template_worker, templates
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.exchange import open_chat
from jaxpage.serving.wire.rendering import RENDERERS
from tests.support.holding import held
from tests.support.raw_http import OF_THE_MACHINE
from tests.support.running import Running, metrics, running, wait_until
from tests.support.sweeps import few
from tests.support.wire import context, with_template

KEYS = ("a-first-key-of-this-test", "a-second-key-of-this-test")
COMPLETION: dict[str, Any] = {
    "model": "demo",
    "prompt": "Once upon a time",
    "max_tokens": 4,
    "temperature": 0,
}
CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Hm"}],
    "max_tokens": 2,
}
MIB = 1 << 20
ROOT = Path(__file__).parents[1]


class Witness:
    """Notes what the audit events of the interpreter tell of: connections, names looked up, files,
    programs.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] | None = None
        sys.addaudithook(self._listen)  # for good: there is no way to take one away

    def _listen(self, event: str, arguments: Any) -> None:
        if self.seen is not None and event in (
            "socket.connect",
            "socket.getaddrinfo",
            "open",
            "os.system",
            "subprocess.Popen",
        ):
            self.seen.append((event, arguments))

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[tuple[str, Any]]]:
        self.seen = seen = []
        try:
            yield seen
        finally:
            self.seen = None


@pytest.fixture(scope="module")
def witness():
    return Witness()


@pytest.fixture(scope="module")
def server():
    with running(ServerConfig(), api_keys=KEYS) as running_server:
        yield running_server


@pytest.fixture
def client(server):
    """Has a key. None of its answers has anything of the machine in it."""

    def check(answer: httpx.Response) -> None:
        answer.read()
        if answer.status_code >= 400:
            assert not OF_THE_MACHINE.search(answer.text), answer.text
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    headers = {"Authorization": f"Bearer {KEYS[1]}"}
    with httpx.Client(
        base_url=server.address, timeout=120, headers=headers, event_hooks={"response": [check]}
    ) as running_server:
        yield running_server


def _port(server: Running) -> int:
    return int(server.address.rpartition(":")[2])


# Doors


def test_one_socket_listens_and_only_to_this_machine(server, client):
    assert ServerConfig().host == "127.0.0.1"
    # starts its process
    client.post("/v1/completions", json={**COMPLETION, "structured_outputs": {"choice": ["a"]}})
    process = psutil.Process()
    listening = [
        each.laddr
        for member in (process, *process.children(recursive=True))
        for each in member.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    ]
    assert listening == [("127.0.0.1", _port(server))]


def _status(server: Running, method: str, path: str, headers: dict[str, str]) -> int:
    """Returns the status of a path as it is written: nothing tidies it."""
    connection = http.client.HTTPConnection("127.0.0.1", _port(server), timeout=60)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("header", [KEYS[0], KEYS[1], "no key"])
def test_a_key_is_compared_with_all_in_constant_time(server, monkeypatch, header):
    compared: list[tuple[bytes, bytes]] = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append((first, second))
        return real(first, second)

    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    status = _status(server, "GET", "/version", {"Authorization": f"Bearer {header}"})
    assert status == (200 if header in KEYS else 401)
    assert len(compared) == len(KEYS) and {len(part) for pair in compared for part in pair} == {
        32
    }, "digests, all"


# What is asked for from outside


def test_nobody_is_called_and_no_file_is_read(server, client, witness, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    urls = (
        "http://127.0.0.1:9/x.png",
        f"file://{secret}",
        "data:image/png;base64,AAAA",
        "http://example.invalid/",
    )
    with witness.watching() as seen:
        for url in urls:
            parts = [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": url},
            ]
            answer = client.post(
                "/v1/chat/completions",
                json={**CHAT, "messages": [{"role": "user", "content": parts}]},
            )
            assert answer.status_code == 400 and "this model takes text alone" in answer.text
            schema = {"json": {"$ref": url}}
            answer = client.post(
                "/v1/completions", json={**COMPLETION, "structured_outputs": schema}
            )
            assert answer.status_code == 400
        for name in (str(secret), "../../etc/passwd", "http://example.invalid/model"):
            assert (
                client.post("/v1/completions", json={**COMPLETION, "model": name}).status_code
                == 404
            )
            assert client.get(f"/v1/models/{name}").status_code == 404
        assert client.post("/v1/completions", json=COMPLETION).status_code == 200
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    server_address = ("127.0.0.1", _port(server))
    called = [
        arguments[1] if event == "socket.connect" else arguments
        for event, arguments in seen
        if "socket" in event
    ]
    assert {tuple(address[:2]) for address in called} <= {server_address}, (
        "but for the client's own calls"
    )
    read = [str(arguments[0]) for event, arguments in seen if event == "open"]
    assert not [path for path in read if "secret.txt" in path or "passwd" in path]


# Templates

INJECTIONS = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.cycler.__init__.__globals__.os.popen('touch CANARY').read() }}",
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ joiner.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ namespace.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ lipsum.__globals__['os'].system('touch CANARY') }}",
    "{{ lipsum.__globals__.__builtins__.open('CANARY', 'w') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('CANARY', 'w') }}",
    "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.__code__.co_consts }}",
    "{{ (''|attr('__class__')).__mro__ }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ ''['__class__'] }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ ('{0.__class__.__init__.__globals__}'|format)(messages) }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ [].append.__self__.__class__ }}",
    "{% set x = messages.append({'role': 'system', 'content': 'CANARY'}) %}{{ messages }}",
    "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
    "{% include 'config.json' %}",
    "{% extends 'config.json' %}",
    "{{ range(10**9)|list }}",
    "{% for x in range(10**9) %}{% endfor %}",
    f"{{{{ raise_exception('see {__file__} and 0xdeadbeef') }}}}",
)


@pytest.mark.parametrize("template", INJECTIONS, ids=range(len(INJECTIONS)))
def test_templates_of_a_model_cannot_leave_their_sandbox(witness, monkeypatch, tmp_path, template):
    """They are refused or harmless: nothing is run, nothing is written, and nothing of Python shows
    in the prompt.

    The process that renders does so in this one, where the witness sees it.
    """

    def render(request: dict[str, Any], seconds: float, num_bytes: int) -> str:
        try:
            return template_worker.render_template(request)
        except Exception as error:
            raise ValueError(str(error) or type(error).__name__) from None

    monkeypatch.setattr(RENDERERS, "render", render)
    monkeypatch.chdir(tmp_path)
    values = context(tokenizer=with_template(template))
    with witness.watching() as seen:
        try:
            exchange = open_chat(CHAT, values)
        except ApiError as error:
            assert (error.status, error.param) == (400, "messages")
            assert not OF_THE_MACHINE.search(error.message)
        else:
            prompt = exchange.prompts[0].prompt
            assert isinstance(prompt, str) and not re.search(
                "<class|<module|built-in|subprocess|CANARY", prompt
            ), prompt
    assert not [event for event in seen if event[0] != "open"]
    assert not list(tmp_path.iterdir())


# One expression of each takes any time and memory, and is native code that no thread can end.
EXPRESSIONS = {
    "replace": "{{ ('a' * 9999)|replace('a', 'b' * 99999) }}",
    "*": "{{ messages[0].content * 9999999999 }}",
    "center": "{{ messages[0].content|center(9999999999) }}",
    "join": "{{ ([messages[0].content * 1000] * 9999999)|join }}",
    "sort": "{{ (range(99999)|list * 250)|sort(reverse=true)|length }}{{ ('9' * 4000)|list|sort * 99999999 }}",
    "lipsum": "{{ lipsum(n=99999999) }}",
    "wordwrap": "{{ (messages[0].content * 9999999)|wordwrap(1) }}",
    "a loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", few(EXPRESSIONS, ["join", "a loop"]))
def test_a_template_has_its_time_and_its_memory(server, client, monkeypatch, name):
    """A template that goes beyond them is a 400.

    Another client is answered, and the memory comes back.
    """
    monkeypatch.setattr(templates, "RENDER_SECONDS", 0.5)
    template = (
        "{% if messages[0].content == 'x ' %}" + EXPRESSIONS[name] + "{% else %}fine{% endif %}"
    )
    monkeypatch.setattr(server.context.tokenizer, "chat_template", template)
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    hostile = {**CHAT, "messages": [{"role": "user", "content": "x "}]}
    refused: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: refused.append(client.post("/v1/chat/completions", json=hostile))
    )
    began = time.monotonic()
    asking.start()
    assert client.post("/v1/completions", json=COMPLETION).status_code == 200
    asking.join(60)
    assert time.monotonic() - began < 4 * 0.5 + 10, (
        "four times the processor's time, and a busy machine"
    )
    assert refused[0].status_code == 400 and refused[0].json()["error"]["param"] == "messages"
    assert re.search("takes more than 256 MiB of memory|took longer than 0.5 s", refused[0].text)
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    renderers = [
        each
        for each in psutil.Process().children(recursive=True)
        if "template_worker" in str(each.cmdline())
    ]
    assert renderers and all(each.memory_info().rss < 256 * MIB for each in renderers)


# What one client learns of another, or does to it


def test_a_salt_hides_a_prompt_from_others(client):
    """How soon an answer comes tells whether its prompt is cached, so others' prompts must not be
    found.
    """

    def num_cached_tokens(salt: str | None) -> int:
        body = {
            **COMPLETION,
            "prompt": list(range(200, 264)),
            **({} if salt is None else {"cache_salt": salt}),
        }
        before = metrics(client)["jaxpage_prefix_cache_hits_total"]
        usage = client.post("/v1/completions", json=body).json()["usage"]
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert metrics(client)["jaxpage_prefix_cache_hits_total"] - before == num_cached
        return int(num_cached)

    assert [num_cached_tokens("mine"), num_cached_tokens("yours"), num_cached_tokens(None)] == [
        0,
        0,
        0,
    ]
    assert all(num_cached_tokens(salt) >= 48 for salt in ("mine", "yours", None))


def test_ids_are_the_servers_own(server, client):
    """Two requests have one id of their clients: one leaves, and the other is answered."""
    headers = {"X-Request-Id": "the-same"}
    body = {**COMPLETION, "max_tokens": 50, "ignore_eos": True}
    answers: list[httpx.Response] = []
    with held(server):
        leaving = http.client.HTTPConnection("127.0.0.1", _port(server))
        key = {"Authorization": f"Bearer {KEYS[0]}", "Content-Type": "application/json"}
        leaving.request("POST", "/v1/completions", json.dumps(body), {**headers, **key})
        wait_until(lambda: server.loop.num_open == 1, "the first is there")
        staying = threading.Thread(
            target=lambda: answers.append(
                client.post("/v1/completions", json=body, headers=headers)
            )
        )
        staying.start()
        wait_until(lambda: server.loop.num_open == 2, "both are there")
        leaving.close()
        wait_until(lambda: server.server.visitors._number == 1, "the first has left")
    staying.join(60)
    (answer,) = answers
    assert (
        answer.json()["usage"]["completion_tokens"] == 50
        and answer.headers["x-request-id"] == "the-same"
    )
    assert "the-same" not in answer.json()["id"]
    assert (
        answer.json()["id"]
        != client.post("/v1/completions", json=body, headers=headers).json()["id"]
    )


# What grows


def test_what_clients_make_up_is_no_label(server, client):
    def series() -> set[tuple[str, str]]:
        families = text_string_to_metric_families(client.get("/metrics").text)
        return {
            (sample.name, str(sample.labels)) for family in families for sample in family.samples
        }

    before = series()
    key = {"Authorization": f"Bearer {KEYS[0]}"}
    for number in range(50):
        _status(server, f"M{number}", f"/path-{number}", key)
    for number in range(20):
        client.post(
            "/v1/completions",
            json={**COMPLETION, "model": f"m{number}", f"field_{number}": 1, "user": "x"},
        )
    assert series() == before


def test_unique_schemas_are_forgotten(server, client, witness, monkeypatch):
    def ask(number: int) -> None:
        properties = {
            f"name_{number}_{index}": {"type": "string", "maxLength": 20} for index in range(20)
        }
        expected = {
            "json": {"type": "object", "properties": properties, "required": list(properties)}
        }
        body = {**COMPLETION, "max_tokens": 1, "structured_outputs": expected}
        assert client.post("/v1/completions", json=body).status_code == 200

    monkeypatch.setattr(grammar_compiler, "CACHED_GRAMMARS", 8)
    for number in range(8):
        ask(number)
    before = psutil.Process().memory_info().rss
    with witness.watching() as seen:
        for number in range(1000, 1016):
            ask(number)
    compiler = server.loop.engine.grammars
    assert len(compiler._cache) == 8
    assert sum(size for _, size in compiler._cache.values()) <= grammar_compiler.CACHED_BYTES
    assert psutil.Process().memory_info().rss < before + 50 * MIB
    written = [
        arguments
        for event, arguments in seen
        if event == "open" and set(str(arguments[1])) & set("wax+")
    ]
    assert not written, "no file is made"


def test_a_grammar_has_its_time_of_the_processor():
    """A machine that is busy with others refuses no grammar for that.

    One that works without end is ended.
    """
    program = """
import json, os, time
from jaxpage.decoding import grammar_worker

def waits(*arguments):
    time.sleep(1.5)
    os.write(arguments[-1], json.dumps([None, 7]).encode())
    os._exit(0)

def works(*arguments):
    while True:
        pass

for grammar_worker._try in (waits, works):
    print(grammar_worker._try_grammar(None, "regex", "", 1.0, 1 << 20))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["(None, 7)", "('compiling it takes longer than 1 s', 0)"]


# What is told


def test_keys_and_prompts_are_in_no_log(server, client, caplog, monkeypatch):
    """The log has its lowest level, and requests are answered, refused, failed or left."""
    caplog.set_level(logging.DEBUG)
    secret = "xylophone"
    body = {**COMPLETION, "prompt": f"The {secret}", "user": secret, "cache_salt": secret}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert client.post("/v1/completions", json={**body, "temperature": -1}).status_code == 400
    assert client.post("/v1/completions", content=f'{{"prompt": "{secret}",}}').status_code == 415
    assert (
        client.post(
            "/v1/completions", json={**body, "structured_outputs": {"regex": f"{secret}("}}
        ).status_code
        == 400
    )
    chat = {**CHAT, "messages": [{"role": "user", "content": secret}]}
    assert client.post("/v1/chat/completions", json=chat).status_code == 200
    with client.stream(
        "POST", "/v1/completions", json={**body, "stream": True, "max_tokens": 100}
    ) as leaving:
        next(leaving.iter_lines())

    def fail(batch: Any) -> None:
        raise RuntimeError("the device failed")

    with monkeypatch.context() as patch:
        patch.setattr(server.loop.engine.runner, "run", fail)
        assert client.post("/v1/completions", json=body).status_code == 500
    assert "the device failed" in caplog.text, "something was logged"
    formatter = logging.Formatter()
    for record in caplog.records:
        if not record.name.startswith(("httpx", "httpcore")):
            text = formatter.format(record) + repr(vars(record))
            assert secret not in text and not any(key in text for key in KEYS), text


def test_the_tests_that_are_promised_exist():
    promised = set(re.findall(r"`(test_\w+)`", (ROOT / "SECURITY.md").read_text()))
    files = (ROOT / "tests").glob("test_*.py")
    assert len(promised) > 30
    assert not promised - {
        name for file in files for name in re.findall(r"def (test_\w+)\(", file.read_text())
    }
