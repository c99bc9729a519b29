"""The recipe for Ray Serve: two replicas answer, one is killed while clients read, and another
comes.

It needs ray, which `.ci/nightly` installs.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from jaxpage import LLM, SamplingParams
from tests.support.running import SMALL, WAIT_SECONDS, free_port, wait_until

# The texts are those of a process that is compiled as for users.
pytestmark = [
    pytest.mark.sweep,
    pytest.mark.optimized,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]

ROOT = Path(__file__).parents[1]
# All requests of the test run at once, in one replica, too.
SETTINGS = {**SMALL, "model": "demo", "max_num_seqs": 8}
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray gives its processes the lowest priority: on a busy machine they start in minutes.
    "RAY_worker_niceness": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
}
# Ray forks, which a process that has jax must not: the driver is a process of its own.
DRIVER = """
import sys, ray
from ray import serve
from deploy.ray_serve import Jaxpage

directory, port = sys.argv[1:]
ray.init(
    num_cpus=3, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False, _temp_dir=directory
)
serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
scaling = {"min_replicas": 2, "max_replicas": 2, "target_ongoing_requests": 8}
serve.run(Jaxpage.options(autoscaling_config=scaling).bind())
print("running", flush=True)
sys.stdin.read()  # until the test closes it
"""
NUM_TOKENS = 400
START_SECONDS = 400.0  # for two engines at once, on two busy cores
PROMPTS = [f"Tell me a story about a {one}." for one in
           ("fox", "mill", "king", "boat", "girl", "bell", "lamp", "horse")]  # fmt: skip
NUM_STREAMS = 6  # the other prompts are asked for whole


def conversation(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


@pytest.fixture(scope="module")
def plain_texts():
    """Returns the texts that an engine without a server gives."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(use_tqdm=False, **SETTINGS) as llm:
        outputs = llm.chat([conversation(prompt) for prompt in PROMPTS], params)
    return {prompt: output.outputs[0].text for prompt, output in zip(PROMPTS, outputs, strict=True)}


class Cluster:
    """Ray with two replicas: the address of its proxy, and its processes."""

    def __init__(self, directory: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        config = Path(directory, "jaxpage.yaml")
        config.write_text("".join(f"{name}: {value}\n" for name, value in SETTINGS.items()))
        self._driver = psutil.Popen(
            [sys.executable, "-c", DRIVER, directory, str(port)],
            env={**os.environ, **ENVIRONMENT, "JAXPAGE_CONFIG": str(config)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def wait(self) -> None:
        lines = iter(self._driver.stdout.readline, b"")
        assert any(line == b"running\n" for line in lines), "standard error says what fails"

    def replicas(self) -> list[psutil.Process]:
        return [
            process
            for process in self._driver.children(recursive=True)
            if "ServeReplica:default:Jaxpage" in " ".join(process.cmdline())
        ]

    def end(self) -> None:
        started = [self._driver, *self._driver.children(recursive=True)]
        self._driver.stdin.close()
        for process in psutil.wait_procs(started, timeout=30)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._driver.stdout.close()


@pytest.fixture(scope="module")
def cluster():
    # The name is short, since those of Ray's sockets begin with it.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        started = Cluster(directory)
        try:
            started.wait()
            yield started
        finally:
            started.end()


class Requested:
    """A request by the client of OpenAI on a thread: its text, and how it ended."""

    def __init__(self, url: str, prompt: str, *, stream: bool) -> None:
        self.prompt = prompt
        self.text = ""
        self.has_begun = threading.Event()
        self.error: Exception | None = None
        self._client = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300
        )
        self.kind = "stream" if stream else "whole"

    def run(self) -> None:
        body: dict[str, Any] = {
            "model": "demo",
            "messages": conversation(self.prompt),
            "temperature": 0,
            "max_tokens": NUM_TOKENS,
            "extra_body": {"ignore_eos": True},
        }
        try:
            if self.kind == "whole":
                answer = self._client.chat.completions.create(**body)
                self.text = answer.choices[0].message.content
                return
            for chunk in self._client.chat.completions.create(**body, stream=True):
                self.text += chunk.choices[0].delta.content or ""
                if self.text:
                    self.has_begun.set()
        except (openai.APIError, httpx.HTTPError) as error:
            self.error = error


def test_a_killed_replica_ends_its_requests_with_an_error_and_is_replaced(cluster, expected):
    url = cluster.url
    requested = [Requested(url, prompt, stream=n < NUM_STREAMS) for n, prompt in enumerate(PROMPTS)]
    streams = requested[:NUM_STREAMS]
    before = cluster.replicas()
    assert len(before) == 2
    with ThreadPoolExecutor(len(requested)) as pool:
        running = [pool.submit(each.run) for each in requested[NUM_STREAMS:]]
        for stream in streams:  # one by one, so that Ray shares them out
            running.append(pool.submit(stream.run))
            assert stream.has_begun.wait(WAIT_SECONDS), stream.error
        killed_at = time.time()
        before[0].kill()
        for each in running:
            each.result()
    for each in requested:
        if each.error is None:
            assert each.text == expected[each.prompt]
        else:
            assert (
                expected[each.prompt].startswith(each.text) and each.text != expected[each.prompt]
            )
    for each in requested:
        print(f"{each.kind}: {each.error!r}" if each.error else f"{each.kind}: the right text")
    assert 0 < sum(each.error is not None for each in streams) < len(streams)

    # The new replica is the one that says that its model is there since later.
    def new_answers() -> bool:
        answer = httpx.get(f"{url}/v1/models", timeout=60)
        return answer.status_code == 200 and answer.json()["data"][0]["created"] > killed_at

    wait_until(new_answers, "a new replica answers", START_SECONDS)
    later = [Requested(url, prompt, stream=n % 2 == 0) for n, prompt in enumerate(PROMPTS)]
    with ThreadPoolExecutor(len(later)) as pool:
        list(pool.map(Requested.run, later))
    assert [each.error for each in later] == [None] * len(later)
    assert {each.prompt: each.text for each in later} == expected


def test_without_a_key_only_requests_to_this_machine_pass_the_proxy(cluster):
    """Ray's proxy passes the client's Host on, so the guard of the server sees it."""
    for host, status in (("evil.example", 403), ("localhost", 200)):
        assert httpx.get(f"{cluster.url}/v1/models", headers={"Host": host}).status_code == status
