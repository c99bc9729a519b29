"""Two servers behind vllm-router, if it is installed: a prefix goes to the server that has it, and one may be killed.

`pip install vllm-router` where its command is found; `.ci/nightly` does.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.running import metrics, wait_until

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.skipif(shutil.which("vllm-router") is None, reason="there is no vllm-router"),
]
SETTINGS = [
    "--dtype",
    "float32",
    "--max-num-seqs",
    "4",
    "--num-blocks",
    "129",
    "--served-model-name",
    "demo",
    "--strict-requests",
]
STORIES = [f"Story {name}. " + f"Once upon a time {name} went to the {place}. " * 6 for name, place in
           (("Anna", "sea"), ("Ben", "hill"), ("Carl", "mill"), ("Dora", "town"))]  # fmt: skip


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


class Replica:
    """A server of the demo model as a process, which publishes KV events."""

    def __init__(self, log: Path) -> None:
        self.port, self.events, self.replay = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        endpoints = ["--kv-events", self.endpoint(self.events), "--kv-events-replay", self.endpoint(self.replay)]
        command = [sys.executable, "-m", "jaxpage", "serve", "demo", "--port", str(self.port), *SETTINGS, *endpoints]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def endpoint(self, port: int) -> str:
        return f"tcp://127.0.0.1:{port}"

    @property
    def num_tokens_found(self) -> float:
        with httpx.Client(base_url=self.url) as client:
            return metrics(client)["jaxpage_prefix_cache_hits_total"]

    @property
    def num_finished(self) -> float:
        with httpx.Client(base_url=self.url) as client:
            return sum(n for name, n in metrics(client).items() if name.startswith("jaxpage_request_success_total"))


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=1).status_code == 200
    return False


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replica]]:
    directory = tmp_path_factory.mktemp("replicas")
    started = [Replica(directory / f"{index}.log") for index in range(2)]
    try:
        for one in started:
            wait_until(lambda one=one: answers(one.url), f"{directory}: a server answers", 240)
        yield started
    finally:
        for one in started:
            one.process.kill()
            one.process.wait()


@contextlib.contextmanager
def routed(replicas: list[Replica], log: Path) -> Iterator[str]:
    port = free_port()
    command = ["vllm-router", "--host", "127.0.0.1", "--port", str(port), "--policy", "kv_aware"]
    command += ["--worker-urls", *(one.url for one in replicas), "--prometheus-port", str(free_port())]
    command += ["--kv-event-block-size", "16", "--kv-event-model", "demo", "--health-check-interval-secs", "1"]
    for one in replicas:
        command += ["--kv-event-source", f"{one.url}={one.endpoint(one.events)}"]
        command += ["--kv-event-replay-source", f"{one.url}={one.endpoint(one.replay)}"]
    with log.open("wb") as file:
        router = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answers(url) or router.poll() is not None, f"{log}: the router answers")
        assert router.poll() is None, log.read_text()
        yield url
    finally:
        router.kill()
        router.wait()


def completed(url: str, prompt: str, **fields: Any) -> str:
    body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_prefixes_find_their_server_and_a_killed_one_is_not_missed(replicas: list[Replica], tmp_path: Path) -> None:
    held = {story: index % 2 for index, story in enumerate(STORIES)}
    with routed(replicas, tmp_path / "router.log") as url:
        time.sleep(2)  # until it listens to the events: of those before it knows nothing
        for prompt, holder in held.items():
            completed(replicas[holder].url, prompt)
        time.sleep(1)
        for prompt, holder in [*held.items()] * 2:
            before = [one.num_finished for one in replicas]
            completed(url, prompt + "they")
            went_to = [after - n for after, n in zip((one.num_finished for one in replicas), before, strict=True)]
            print(f"{prompt[:12]!r}: held by server {holder}, went to server {went_to.index(1)}")
            assert went_to[holder] == 1
        wanted = {story: completed(replicas[0].url, story) for story in STORIES}
        assert wanted == {story: completed(replicas[1].url, story) for story in STORIES}, "texts are the same on both"
        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(completed, url, story) for story in STORIES * 4]
            replicas[0].process.send_signal(signal.SIGKILL)
            ended = [(one.exception(), one) for one in running]
        later = [completed(url, story) for story in STORIES * 4]
        num_failed = sum(error is not None for error, _ in ended)
        print(
            f"killed server 0: {num_failed} of {len(running)} requests at that moment failed, {len(later)} later ones did not"
        )
        assert later == [wanted[story] for story in STORIES * 4]
        assert all(
            one.result() == wanted[story] for (error, one), story in zip(ended, STORIES * 4, strict=True) if not error
        )
