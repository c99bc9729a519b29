"""`bench serve` and `bench latency`: the numbers are those of their definitions, and the baselines do what they are called."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxpage import cli
from jaxpage.bench.http_client import Answer, Client
from jaxpage.bench.latencies import summary
from jaxpage.bench.load import Places
from tests.support.random_checkpoints import random_checkpoint
from tests.test_bench import LLAMA


class FakeServer:
    """A server that streams as many tokens as it is asked for, and remembers which streams were open together."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.log: list[tuple[str, int]] = []  # ("begins" | "ends", index of the body)
        self.status = 200
        self.frames: list[bytes] | None = None  # in place of tokens
        self.together = 1  # so many streams begin before one of them goes on; the first is alone
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    @property
    def most(self) -> int:
        """Requests at the same time, at most."""
        now = most = 0
        for what, _ in self.log:
            now += 1 if what == "begins" else -1
            most = max(most, now)
        return most

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._answer, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split("\r\n")[0].split()
        length = int(head.lower().partition("content-length: ")[2].split("\r\n")[0])
        body = await reader.readexactly(length)
        if method == "GET":
            found: dict[str, Any] = {"data": [{"id": "a", "max_model_len": 64}, {"id": "b", "max_model_len": 64}]}
            if path == "/v1/capabilities":
                found = {"model": {"vocab_size": 50}}
            self._head(writer)
            self._part(writer, json.dumps(found).encode())
        else:
            await self._stream(json.loads(body), writer)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        index = len(self.bodies)
        self.bodies.append(body)
        self.log.append(("begins", index))
        while len(self.bodies) - 1 < -(-index // self.together) * self.together:
            await asyncio.sleep(0.001)
        self._head(writer)
        tokens = [b'data: {"choices": [{"text": "x"}]}\n\n'] * body["max_tokens"]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        ending = [b": a comment\n\n", b'data: {"choices": [], "usage": ' + json.dumps(usage).encode() + b"}\n\n"]
        for frame in [*tokens, *ending, b"data: [DONE]\n\n"] if self.frames is None else self.frames:
            for half in (frame[:7], frame[7:]):  # what belongs together may come apart
                self._part(writer, half)
                await writer.drain()
                await asyncio.sleep(0)
        self.log.append(("ends", index))

    def _head(self, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {self.status} x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode())

    def _part(self, writer: asyncio.StreamWriter, part: bytes) -> None:
        writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


SMALL = ["--dataset", "random", "--max-input", "10", "--max-output", "6"]


def bench(server: FakeServer, *words: str, capsys: pytest.CaptureFixture[str], status: int = 0) -> dict[str, Any]:
    assert cli.main(["bench", "serve", "--base-url", server.url, *SMALL, *words]) == status
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


# ---- numbers


def test_latencies_by_their_definitions() -> None:
    """By hand: 4 tokens in 3 outputs; 1 token; a failure, which counts nowhere else."""
    answers = [
        Answer(due=10.0, outputs=[10.5, 11.0, 12.0], ended=12.1, num_prompt_tokens=7, num_output_tokens=4),
        Answer(due=11.0, outputs=[13.5], ended=13.5, num_prompt_tokens=3, num_output_tokens=1),
        Answer(due=0.0, error="status 429"),
    ]
    result = summary(answers, 4.0)
    wanted = {
        "completed": 2,
        "failed": 1,
        "errors": ["status 429"],
        "total_input_tokens": 10,
        "total_output_tokens": 5,
        "request_throughput": 0.5,
        "output_throughput": 1.25,
        "total_token_throughput": 3.75,
        "mean_ttft_ms": 1500.0,
        "median_ttft_ms": 1500.0,
        "mean_tpot_ms": 500.0,
        "mean_itl_ms": 750.0,
        "p99_itl_ms": pytest.approx(995.0),
        "mean_e2el_ms": 2250.0,
    }
    assert {name: result[name] for name in wanted} == wanted


def test_a_run_without_a_success_has_numbers_all_the_same() -> None:
    assert summary([Answer(due=0.0, error="x")], 1.0)["mean_ttft_ms"] == 0.0


# ---- the client


def test_every_request_is_sent_and_counted(
    server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    result = bench(server, "--num-prompts", "9", "--seed", "3", "--output-json", str(path), capsys=capsys)
    warm_up, *bodies = server.bodies
    assert len(bodies) == result["completed"] == 9 and json.loads(path.read_text()) == result
    assert result["total_input_tokens"] == sum(len(body["prompt"]) for body in bodies)
    assert result["total_output_tokens"] == sum(body["max_tokens"] for body in bodies)
    assert all(body["stream"] and body["ignore_eos"] and body["temperature"] == 0 for body in bodies)
    assert {body["model"] for body in bodies} == {"a"} and all(max(body["prompt"]) < 50 for body in bodies)
    [salt] = {body["cache_salt"] for body in bodies}
    assert "cache_salt" not in warm_up and len(salt) == 32
    assert result["request_rate"] is None and "device" not in result["environment"]


def test_no_more_requests_at_a_time_than_asked_for(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.together = 3
    bench(server, "--num-prompts", "12", "--max-concurrency", "3", "--model", "b", capsys=capsys)
    assert server.most == 3 and server.bodies[-1]["model"] == "b"


@pytest.mark.parametrize("whole", [False, True])
def test_a_place_that_is_free_is_given_on_unless_batches_stay_whole(whole: bool) -> None:
    async def run() -> list[list[int]]:
        places, admitted, seen = Places(2, whole=whole), [], []

        async def one(index: int) -> None:
            await places.take()
            admitted.append(index)

        tasks = [asyncio.ensure_future(one(index)) for index in range(5)]
        for leaves in (False, True, True, True, True):
            if leaves:
                places.give_back()
            for _ in range(10):  # turns of the loop: far more than it takes
                await asyncio.sleep(0)
            seen.append(list(admitted))
        await asyncio.gather(*tasks)
        return seen

    one_by_one = [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    in_batches = [[0, 1], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert asyncio.run(run()) == (in_batches if whole else one_by_one)


def test_static_batches_wait_for_their_last(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(server, "--num-prompts", "10", "--baseline", "static", "--baseline-batch-size", "4", capsys=capsys)
    [static] = result["baselines"]
    assert (static["engine"], static["completed"]) == ("static batches of 4", 10)
    continuous, batches = server.bodies[1:11], server.bodies[11:]
    assert [body["prompt"] for body in batches] == [body["prompt"] for body in continuous], "the same work"
    assert {body["cache_salt"] for body in batches}.isdisjoint(body["cache_salt"] for body in continuous)
    log = [(what, index - 11) for what, index in server.log if index >= 11]
    for first in (0, 4, 8):
        batch = [(what, index) for what, index in log if first <= index < first + 4]
        assert log[: len(batch)] == batch, "a batch has ended before the next begins"
        log = log[len(batch) :]
    assert not log


def test_requests_arrive_at_the_rate_that_was_asked_for(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    """200 requests at 500 a second: not before the last is due. A slow machine may take longer."""
    result = bench(server, "--num-prompts", "200", "--request-rate", "500", "--max-output", "1", capsys=capsys)
    assert result["duration"] > 0.3 and result["request_throughput"] < 650


def test_failures_are_counted_and_the_status_is_1(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    good = asyncio.run(Client(server.url).complete({"prompt": [1], "max_tokens": 2}, 0.0))
    assert good.error is None and len(good.outputs) == 2
    for frames, error in (
        ([b'data: {"error": {"message": "it broke"}}\n\n', b"data: [DONE]\n\n"], "it broke"),
        ([b"data: [DONE]\n\n"], "the stream ended without an output or without usage"),
        ([b"data: {\n\n"], "Expecting property name"),
    ):
        server.frames = frames
        answer = asyncio.run(Client(server.url).complete({"prompt": [1], "max_tokens": 2}, 0.0))
        assert answer.error is not None and error in answer.error
    server.status = 503
    assert asyncio.run(Client(server.url).complete({"prompt": [1], "max_tokens": 2}, 0.0)).error == "status 503"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--base-url", "ftp://x"), "--base-url must be a URL such as http://127.0.0.1:8000"),
        (("--base-url", "http://127.0.0.1:1"), "/v1/models of the server cannot be had"),
        (("--request-rate", "0"), "--request-rate must be more than 0, got 0.0"),
        (("--request-rate", "nan"), "--request-rate must be more than 0, got nan"),
        (("--burstiness", "-1"), "--burstiness must be more than 0"),
        (("--burstiness", "0.5"), "--burstiness needs --request-rate: without it all requests come at once"),
        (("--output-json", "no/such/file"), "--output-json no/such/file: there is no such directory"),
        (("--max-concurrency", "0"), "--max-concurrency must be at least 1, got 0"),
        (("--baseline", "orca"), "--baseline must be static, got 'orca'"),
        (("--dataset", "mine"), "--dataset must be one of sharegpt, alpaca, random, prefix_repetition"),
        (("--num-prompts", "0"), "--num-prompts must be at least 1"),
    ],
)
def test_wrong_use_of_bench_serve(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_server_that_cannot_be_measured(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", "--base-url", server.url, "--model", "c"]) == 2
    assert "the server has no such model" in capsys.readouterr().err
    server.frames = [b"data: [DONE]\n\n"]
    assert cli.main(["bench", "serve", "--base-url", server.url]) == 2
    assert "the first request failed" in capsys.readouterr().err


# ---- latency


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("bench") / "llama", LLAMA)


def test_latency_of_a_batch_and_of_other_settings_beside_it(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(model), "--batch-size", "2", "--input-len", "8", "--output-len", "4", "--num-iters", "3"]
    engine = ["--num-blocks", "17", "--max-num-seqs", "2", "--preemption-mode", "recompute"]
    assert cli.main(["bench", "latency", *words, *engine, "--versus", "enable_prefix_caching=false"]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert len(result["latencies"]) == 3 and result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert (
        min(result["latencies"])
        <= result["percentiles"]["10"]
        <= result["percentiles"]["50"]
        <= max(result["latencies"])
    )
    assert [one["engine"] for one in result["baselines"]] == ["enable_prefix_caching=false"]
    assert "p99 (s)" in out and result["environment"]["device"].startswith("cpu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch-size", "0"), "--batch-size must be at least 1, got 0"),
        (("--num-iters-warmup", "-1"), "--num-iters-warmup must be at least 0, got -1"),
        (("--baseline", "orca"), "--baseline must be one of transformers, got 'orca'"),
        (("--versus", "model=other"), "--versus cannot change model"),
    ],
)
def test_wrong_use_of_bench_latency(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "latency", *words]) == 2
    assert message in capsys.readouterr().err
