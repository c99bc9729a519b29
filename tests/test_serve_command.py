"""`jaxpage serve` in a process of its own: what it says while it starts, that what it says can be
copied, and how it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import psutil
import pytest

from jaxpage import cli
from jaxpage.assembly import PHASES
from tests.support.raw_http import request_bytes
from tests.support.running import SMALL, metrics, wait_until

# The settings of other files, whose executables are found in the compile cache.
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
KEY = "sk-a-key-for-this-test"


class Served:
    """A server that is ready.

    Attributes:
        process: Its process.
        url: Its address.
        said: What it had said when it was ready.
        lines: What it has said since.
    """

    def __init__(self, process: subprocess.Popen[str], ready: str) -> None:
        assert process.stderr is not None
        self.process = process
        self.said = ""
        self.lines: list[str] = []
        while not re.search(ready, self.said):
            line = process.stderr.readline()
            assert line, f"it ended: {self.said}"
            self.said += line
        url = re.search(r"http://[^\s/\"]+", self.said)
        self.url = url[0] if url else ""
        self._reader = threading.Thread(target=self.lines.extend, args=(process.stderr,))
        self._reader.start()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextlib.contextmanager
def serving(
    *words: str, ready: str, program: Sequence[str] = ("-m", "jaxpage")
) -> Iterator[Served]:
    """Runs the server, from a line that says how far it is to its end."""
    command = [sys.executable, *program, "serve", "demo", "--port", "0", *FLAGS, *words]
    environment = {**os.environ, "JAXPAGE_API_KEY": KEY}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    server = Served(process, ready)
    try:
        yield server
    finally:
        server.end()


def run_copied(*command: str) -> str:
    """Returns what a program answers that has the key in its environment."""
    environment = {**os.environ, "JAXPAGE_API_KEY": KEY}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def ready_server():
    """Yields a server that the last test that uses it ends."""
    with serving(ready=r"print\(client.*\n") as server:
        yield server


@pytest.fixture
def client(ready_server):
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=ready_server.url, headers=headers, timeout=60) as client:
        yield client


def test_start_up_has_phases_and_ends_with_calls_that_can_be_copied(ready_server):
    phases = re.findall(r"^\[(\d)/5\] (.*)$", ready_server.said, re.MULTILINE)
    assert phases == [
        (str(number), name.capitalize()) for number, name in enumerate(PHASES, start=1)
    ]
    assert (
        "sequences of 512 tokens" in ready_server.said
        and "were in the compile cache" in ready_server.said
    )
    took = re.findall(r"^ +\d+\.\d s$", ready_server.said, re.MULTILINE)
    assert len(took) == 5, "how long each took"
    assert KEY not in ready_server.said and "JAXPAGE_API_KEY" in ready_server.said
    curl = re.search(r"^  (curl .*)$", ready_server.said, re.MULTILINE)
    snippet = ready_server.said.partition("  import os")[2]
    assert curl is not None and snippet
    if shutil.which("curl"):
        assert json.loads(run_copied("bash", "-c", curl[1]))["choices"][0]["message"]["content"]
    program = "\n".join(line.removeprefix("  ") for line in ("  import os" + snippet).splitlines())
    assert run_copied(sys.executable, "-c", program).strip()


def test_capabilities_tell_what_this_server_is(client):
    facts = client.get("/v1/capabilities").json()
    assert facts["model"]["max_model_len"] == 512 and facts["model"]["has_chat_template"]
    assert facts["limits"]["max_num_seqs"] == 4 and facts["limits"]["max_prompts"] > 1
    assert facts["tools"] is None
    assert facts["parameters"]["temperature"]["streaming"] == "yes"
    assert facts["parameters"]["best_of"]["streaming"] == "refused"
    assert client.get("/metrics").text.count("jaxpage_compile_total{") == 1
    no_profiler = client.post("/start_profile")
    assert no_profiler.status_code == 404, "there is no profiler unless it was asked for"


def test_bench_serve_measures_it(ready_server, client, monkeypatch, capsys):
    """The client and the server count the same."""
    monkeypatch.setenv("JAXPAGE_API_KEY", KEY)
    words = ["--num-prompts", "5", "--dataset", "random", "--max-input", "20"]
    words += ["--max-output", "8", "--baseline", "static"]
    before = num_generated(client)
    assert cli.main(["bench", "serve", "--base-url", ready_server.url, *words]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    [static] = result["baselines"]
    assert result["completed"] == static["completed"] == 5
    assert result["total_output_tokens"] == static["total_output_tokens"]
    warm_up = (num_generated(client) - before) - 2 * result["total_output_tokens"]
    assert 1 <= warm_up <= 8
    assert 0 < result["median_ttft_ms"] <= result["median_e2el_ms"]


def num_generated(client: httpx.Client) -> float:
    return metrics(client)["jaxpage_generation_tokens_total"]


def test_sigterm_under_load_then_exit_status_0_and_no_child_left(ready_server, client):
    """Beforehand SIGHUP changes nothing, and says so."""
    ready_server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: any("SIGHUP is ignored" in line for line in ready_server.lines))
    statuses: list[Any] = []
    texts: list[str] = []
    requested = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 60, "temperature": 0}
    requested |= {"ignore_eos": True, "structured_outputs": {"regex": "[a-z ]{70,90}"}}

    def post() -> None:
        try:
            answer = client.post("/v1/completions", json=requested)
        except httpx.HTTPError:
            statuses.append("closed")
        else:
            statuses.append(answer.status_code)
            texts.extend([answer.json()["choices"][0]["text"]] if answer.status_code == 200 else [])

    warm = client.post("/v1/completions", json=requested)
    expected = warm.json()["choices"][0]["text"]
    children = psutil.Process(ready_server.process.pid).children(recursive=True)
    assert children  # the process that tries grammars
    threads = [threading.Thread(target=post) for _ in range(10)]
    for thread in threads:
        thread.start()
    wait_until(lambda: metrics(client)["jaxpage_num_requests_running"] == 4)
    ready_server.process.send_signal(signal.SIGTERM)
    assert ready_server.process.wait(60) == 0, "".join(ready_server.lines)
    for thread in threads:
        thread.join()
    wait_until(lambda: any("SIGTERM: finishing what runs" in line for line in ready_server.lines))
    assert set(statuses) <= {200, 503, "closed"} and statuses.count(200) >= 4
    assert set(texts) == {expected}
    assert not psutil.wait_procs(children, timeout=30)[1], "a child is left"
    assert "Traceback" not in "".join(ready_server.lines)


def test_an_interrupt_while_it_starts_ends_it_at_once_and_json_logs_are_objects():
    with serving("--log-json", ready=f'"message": "{PHASES[-2]}"') as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == -signal.SIGINT
    records = [json.loads(line) for line in server.said.splitlines()]
    assert [record["message"] for record in records] == list(PHASES[:-1])
    assert all(record["seconds"] >= 0 for record in records if record["logger"].endswith("startup"))


STUCK = """
import sys, threading
from jaxpage.cli import main
from jaxpage.serving.wire.completions import CompletionAnswer
CompletionAnswer.whole = lambda *_: threading.Event().wait()
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.sweep  # a third start of a server
def test_a_second_signal_ends_it_at_once():
    """A request that does not end, and a thread that writes an answer for ever, are left behind."""
    words = ("--shutdown-timeout-seconds", "3600")
    with serving(*words, ready="Ctrl-C ends it", program=("-c", STUCK)) as server:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        body = {"model": "demo", "prompt": "Once", "max_tokens": 8, "ignore_eos": True}
        key = {"Authorization": f"Bearer {KEY}"}
        with (
            socket.create_connection(address) as visitor,
            socket.create_connection(address) as other,
            httpx.Client(base_url=server.url, headers=key) as client,
        ):
            sent = request_bytes("POST", "/v1/completions", b"{", Content_Length="1000", **key)
            visitor.sendall(sent)
            other.sendall(request_bytes("POST", "/v1/completions", body, **key))
            wait_until(lambda: num_generated(client) == 8)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: client.get("/ready").status_code == 503)
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(30) == 1, "".join(server.lines)
    assert "Traceback" not in "".join(server.lines)
