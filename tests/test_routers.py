"""Two servers behind vllm-router and behind smg, if they are installed: a prefix goes to the server
that has it, and one may be killed.

`pip install vllm-router smg` where their commands are found; `.ci/nightly` does.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.running import free_port, metrics, wait_until

pytestmark = pytest.mark.sweep


def if_installed(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"there is no {program}")


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
STORIES = [f"Story {name}. " + f"Once upon a time {name} went to the {place}. " * 6 for name,
           place in
           (("Anna", "sea"), ("Ben", "hill"), ("Carl", "mill"), ("Dora", "town"))]  # fmt: skip


class Replica:
    """A server of the demo model as a process, which publishes KV events."""

    def __init__(self, log: Path) -> None:
        self.port, self.events, self.replay = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        endpoints = [
            "--kv-events",
            self.endpoint(self.events),
            "--kv-events-replay",
            self.endpoint(self.replay),
        ]
        command = [
            sys.executable,
            "-m",
            "jaxpage",
            "serve",
            "demo",
            "--port",
            str(self.port),
            *SETTINGS,
            *endpoints,
        ]
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
            return sum(
                n
                for name, n in metrics(client).items()
                if name.startswith("jaxpage_request_success_total")
            )


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=1).status_code == 200
    return False


@pytest.fixture
def replicas(tmp_path):
    started = [Replica(tmp_path / f"{index}.log") for index in range(2)]
    try:
        for each in started:
            wait_until(lambda each=each: answers(each.url), f"{tmp_path}: a server answers", 240)
        yield started
    finally:
        for each in started:
            each.process.kill()
            each.process.wait()


@contextlib.contextmanager
def route(program: str, *words: str, log: Path) -> Iterator[str]:
    """Runs a router, of which the program's name and flags are given, and yields its address."""
    port = free_port()
    command = [
        program,
        *words,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--prometheus-port",
        str(free_port()),
    ]
    command += ["--health-check-interval-secs", "1"]
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


def complete(url: str, prompt: str, **fields: Any) -> str:
    body = {
        "model": "demo",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 8,
        "ignore_eos": True,
        **fields,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def went_to(url: str, prompt: str, replicas: list[Replica]) -> int:
    """Returns the server that a request went to."""
    before = [each.num_finished for each in replicas]
    complete(url, prompt)
    return [
        after - n for after, n in zip((each.num_finished for each in replicas), before, strict=True)
    ].index(1)


def assert_prefixes_find(held: dict[str, int], url: str, replicas: list[Replica]) -> None:
    """Asserts that prompts go where they were computed; held: the server of each prompt."""
    # no turn that is taken by one after the other
    for prompt, holder in (*held.items(), *reversed(held.items())):
        num_found, server = (
            replicas[holder].num_tokens_found,
            went_to(url, prompt + "they", replicas),
        )
        print(f"{prompt[:12]!r}: held by server {holder}, went to server {server}")
        assert server == holder and replicas[holder].num_tokens_found > num_found


def assert_a_killed_server_is_not_missed(url: str, replicas: list[Replica]) -> None:
    """Kills a server while requests run.

    Those may fail, and no later one; texts are those of either server.
    """
    expected = {story: complete(replicas[0].url, story) for story in STORIES}
    assert expected == {story: complete(replicas[1].url, story) for story in STORIES}, (
        "texts are the same on both"
    )
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(complete, url, story) for story in STORIES * 4]
        replicas[0].process.send_signal(signal.SIGKILL)
        ended = [(each.exception(), each) for each in running]
    later = [complete(url, story) for story in STORIES * 4]
    num_failed = sum(error is not None for error, _ in ended)
    print(
        f"killed server 0: {num_failed} of {len(running)} requests at that moment failed, "
        f"{len(later)} later ones did not"
    )
    assert later == [expected[story] for story in STORIES * 4]
    assert all(
        each.result() == expected[story]
        for (error, each), story in zip(ended, STORIES * 4, strict=True)
        if not error
    )


@if_installed("vllm-router")
def test_vllm_router(replicas, tmp_path):
    """It hears of the caches by KV events."""
    words = ["--policy", "kv_aware", "--worker-urls", *(each.url for each in replicas)]
    words += ["--kv-event-block-size", "16", "--kv-event-model", "demo"]
    for each in replicas:
        words += ["--kv-event-source", f"{each.url}={each.endpoint(each.events)}"]
        words += ["--kv-event-replay-source", f"{each.url}={each.endpoint(each.replay)}"]
    held = {story: index % 2 for index, story in enumerate(STORIES)}
    with route("vllm-router", *words, log=tmp_path / "router.log") as url:
        time.sleep(2)  # until it listens to the events: of those before it knows nothing
        for prompt, holder in held.items():
            complete(replicas[holder].url, prompt)
        time.sleep(1)
        assert_prefixes_find(held, url, replicas)
        assert_a_killed_server_is_not_missed(url, replicas)


@if_installed("smg")
def test_smg(replicas, tmp_path):
    """It remembers where it sent which text."""
    words = ["launch", "--policy", "cache_aware", "--worker-urls", *(each.url for each in replicas)]
    with route("smg", *words, log=tmp_path / "router.log") as url:
        wait_until(
            lambda: len(httpx.get(f"{url}/v1/models").json()["data"]) > 0, "it knows the servers"
        )
        held = {story: went_to(url, story, replicas) for story in STORIES}
        assert set(held.values()) == {0, 1}, "different texts are shared out"
        assert_prefixes_find(held, url, replicas)
        assert_a_killed_server_is_not_missed(url, replicas)
