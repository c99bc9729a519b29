"""`jaxpage serve` in a process of its own: what it says while it starts, that what it says can be copied, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest

from jaxpage import cli
from jaxpage.assembly import PHASES

SMALL = [
    "--max-num-seqs",
    "1",
    "--max-model-len",
    "64",
    "--num-blocks",
    "9",
    "--preemption-mode",
    "recompute",
]
KEY = "sk-a-key-for-this-test"


class Served(NamedTuple):
    """A server that is ready, and what it had said by then."""

    process: subprocess.Popen[str]
    said: str
    url: str


@contextlib.contextmanager
def serving(*words: str, ready: str = "Ctrl-C ends it", **environment: str) -> Iterator[Served]:
    """The server, from a line that says how far it is to its end."""
    command = [sys.executable, "-m", "jaxpage", "serve", "demo", "--port", "0", *SMALL, *words]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    try:
        assert process.stderr is not None
        said = ""
        while not re.search(ready, said):
            line = process.stderr.readline()
            assert line, f"it ended: {said}"
            said += line
        url = re.search(r"http://[^\s/\"]+", said)
        yield Served(process, said, url[0] if url else "")
    finally:
        process.kill()
        process.communicate()


def copied(*command: str) -> str:
    """What a program answers that has the key in its environment."""
    environment = {**os.environ, "JAXPAGE_API_KEY": KEY}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def served():
    with serving("--log-json", ready='"message": "ready"', JAXPAGE_API_KEY=KEY) as server:
        yield server


def test_start_up_has_phases_and_ends_with_calls_that_can_be_copied():
    with serving(ready=r"print\(client.*\n", JAXPAGE_API_KEY=KEY) as server:
        phases = re.findall(r"^\[(\d)/5\] (.*)$", server.said, re.MULTILINE)
        assert phases == [
            (str(number), name.capitalize()) for number, name in enumerate(PHASES, start=1)
        ]
        assert (
            "sequences of 64 tokens" in server.said and "were in the compile cache" in server.said
        )
        assert len(re.findall(r"^ +\d+\.\d s$", server.said, re.MULTILINE)) == 5, (
            "how long each took"
        )
        assert KEY not in server.said and "JAXPAGE_API_KEY" in server.said
        curl, snippet = (
            re.search(r"^  (curl .*)$", server.said, re.MULTILINE),
            server.said.partition("  import os")[2],
        )
        assert curl is not None and snippet
        if shutil.which("curl"):
            assert json.loads(copied("bash", "-c", curl[1]))["choices"][0]["message"]["content"]
        program = "\n".join(
            line.removeprefix("  ") for line in ("  import os" + snippet).splitlines()
        )
        assert copied(sys.executable, "-c", program).strip()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_with_json_logs_every_line_is_an_object(served):
    records = [json.loads(line) for line in served.said.splitlines()]
    assert [record["message"] for record in records][-1] == "ready"
    assert [record["message"] for record in records][:-1] == list(PHASES)
    assert all(record["seconds"] >= 0 for record in records if record["logger"].endswith("startup"))


def test_capabilities_tell_what_this_server_is(served):
    with httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {KEY}"}) as client:
        found = client.get("/v1/capabilities").json()
        assert found["model"]["max_model_len"] == 64 and found["model"]["has_chat_template"]
        assert (
            found["limits"]["max_num_seqs"] == 1
            and found["limits"]["max_prompts"] > 1
            and found["tools"] is None
        )
        assert found["parameters"]["temperature"]["streaming"] == "yes"
        assert found["parameters"]["best_of"]["streaming"] == "refused"
        assert client.get("/metrics").text.count("jaxpage_compile_total{") == 1
        assert client.post("/start_profile").status_code == 404, (
            "there is no profiler unless it was asked for"
        )


def test_nothing_is_told_without_the_key(served):
    for path in ("/metrics", "/v1/capabilities", "/start_profile", "/"):
        assert httpx.get(served.url + path).status_code == 401


def test_an_interrupt_while_it_starts_ends_it_at_once():
    with serving(ready=rf"\[{len(PHASES)}/{len(PHASES)}\]") as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == -signal.SIGINT


def test_bench_serve_measures_it(served, monkeypatch, capsys):
    """What the client counts is what the server counted."""
    monkeypatch.setenv("JAXPAGE_API_KEY", KEY)
    words = [
        "--num-prompts",
        "5",
        "--dataset",
        "random",
        "--max-input",
        "20",
        "--max-output",
        "8",
        "--baseline",
        "static",
    ]
    before = generated(served)
    assert cli.main(["bench", "serve", "--base-url", served.url, *words]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    [static] = result["baselines"]
    assert result["completed"] == static["completed"] == 5
    assert result["total_output_tokens"] == static["total_output_tokens"]
    warm_up = (generated(served) - before) - 2 * result["total_output_tokens"]
    assert 1 <= warm_up <= 8
    assert 0 < result["median_ttft_ms"] <= result["median_e2el_ms"]


def generated(served: Served) -> float:
    text = httpx.get(f"{served.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    found = re.search(r"^jaxpage_generation_tokens_total\{.*\} (.*)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])
