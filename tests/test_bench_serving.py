"""`bench serve` and `bench latency`: the numbers are those of their definitions, and the baselines
do what they are called.
"""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from jaxpage import cli
from jaxpage.bench.serving.answer_latencies import rate_held, summary
from jaxpage.bench.serving.http_client import Client, TimedAnswer
from jaxpage.bench.serving.load import Places
from jaxpage.bench.serving.serve_report import rate_notes, table
from jaxpage.bench.serving.server_metrics import MetricsPoller
from tests.support.random_checkpoints import random_checkpoint
from tests.test_bench import LLAMA


class FakeServer:
    """A server that streams as many tokens as it is asked for, and remembers which streams were
    open together.
    """

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.log: list[tuple[str, int]] = []  # ("begins" | "ends", index of the body)
        self.status = 200
        self.frames: list[bytes] | None = None  # in place of tokens
        self.is_plain = False  # it refuses what OpenAI's API does not have
        self.metrics = ["jaxpage_no_such 0\n"]  # one text per look, the last for ever
        self.together = 1  # so many streams begin before one of them goes on; the first is alone
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    @property
    def maximum(self) -> int:
        """Returns the most requests at the same time."""
        now = maximum = 0
        for what, _ in self.log:
            now += 1 if what == "begins" else -1
            maximum = max(maximum, now)
        return maximum

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
            answer: dict[str, Any] = {
                "data": [{"id": "a", "max_model_len": 64}, {"id": "b", "max_model_len": 64}]
            }
            if path == "/v1/capabilities":
                answer = {"model": {"vocab_size": 50}}
            text = json.dumps(answer)
            if path == "/metrics":
                text = self.metrics.pop(0) if len(self.metrics) > 1 else self.metrics[0]
            self._head(writer)
            self._part(writer, text.encode())
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
        if self.is_plain and "ignore_eos" in body:
            writer.write(
                b"HTTP/1.1 400 x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
            )
            return
        self._head(writer)
        tokens = [b'data: {"choices": [{"text": "x", "token_ids": [7]}]}\n\n'] * body["max_tokens"]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        ending = [
            b": a comment\n\n",
            b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n',
        ]
        ending += [b'data: {"choices": [], "usage": ' + json.dumps(usage).encode() + b"}\n\n"]
        for frame in (
            [*tokens, *ending, b"data: [DONE]\n\n"] if self.frames is None else self.frames
        ):
            for half in (frame[:7], frame[7:]):  # what belongs together may come apart
                self._part(writer, half)
                await writer.drain()
                await asyncio.sleep(0)
        self.log.append(("ends", index))

    def _head(self, writer: asyncio.StreamWriter) -> None:
        writer.write(
            f"HTTP/1.1 {self.status} x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
        )

    def _part(self, writer: asyncio.StreamWriter, part: bytes) -> None:
        writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")


@pytest.fixture
def server():
    server = FakeServer()
    yield server
    server.close()


SMALL = ["--dataset", "random", "--max-input", "10", "--max-output", "6"]


def bench(
    server: FakeServer, *words: str, capsys: pytest.CaptureFixture[str], status: int = 0
) -> dict[str, Any]:
    assert cli.main(["bench", "serve", "--base-url", server.url, *SMALL, *words]) == status
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


# ---- numbers


def test_latencies_by_their_definitions():
    """The numbers are made by hand: 4 tokens in 3 outputs, 1 token, and a failure, which counts
    nowhere else.
    """
    answers = [
        TimedAnswer(
            due=10.0,
            outputs=[10.5, 11.0, 12.0],
            ended=12.1,
            num_prompt_tokens=7,
            num_output_tokens=4,
        ),
        TimedAnswer(due=11.0, outputs=[13.5], ended=13.5, num_prompt_tokens=3, num_output_tokens=1),
        TimedAnswer(due=0.0, error="status 429"),
    ]
    result = summary(answers, 4.0, {"ttft": 600.0, "tpot": 500.0})
    expected = {
        "request_goodput": 0.25,
        "mean_normalized_latency_ms": 1500.0,
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
    assert {name: result[name] for name in expected} == expected


def test_a_latency_without_a_sample_is_no_number():
    """A mean of nothing is not 0, neither where all requests failed nor where each has one token."""
    failed = summary([TimedAnswer(due=0.0, error="x")], 1.0)
    single = TimedAnswer(
        due=1.0, outputs=[1.5], ended=1.5, num_prompt_tokens=3, num_output_tokens=1
    )
    result = summary([single, single], 1.0)
    names = [name for name in result if name.endswith("_ms")]
    assert len(names) == 20 and all(failed[name] is None for name in names)
    lacking = {name for name in names if result[name] is None}
    assert lacking == {name for name in names if name.endswith(("_tpot_ms", "_itl_ms"))}
    lines = table([("one token each", result), ("none", failed)]).splitlines()
    [ttft] = [line for line in lines if line.startswith("Mean TTFT")]
    assert ttft.split()[-2:] == ["500.00", "-"]
    assert not any("TPOT" in line or "ITL" in line for line in lines)


def test_a_run_between_two_polls_has_no_means_of_the_server():
    """The server was idle before it and after it, and busy at each poll within."""
    gauges = "vllm:num_requests_running {}\nvllm:kv_cache_usage_perc {}\n# TYPE a gauge\n"
    gauges += "# TYPE vllm:num_preemptions counter\nvllm:num_preemptions_total {}\n"
    idle, busy = gauges.format(0, 0.0, 1), gauges.format(3, 0.5, 2)

    class Texts:
        def __init__(self, *texts: str) -> None:
            self.texts = list(texts)

        async def text(self, path: str) -> str:
            return self.texts.pop(0)

    async def measure(*texts: str) -> dict[str, Any]:
        poller = MetricsPoller(Texts(*texts))  # type: ignore[arg-type]
        poller._start = 0.0
        for _ in texts:
            await poller._read_all()
        return poller.as_dict()

    short = asyncio.run(measure(idle, idle.replace("_total 1", "_total 3")))
    assert short == {"num_preemptions": 2}
    longer = asyncio.run(measure(idle, busy, idle))
    assert longer["mean_num_requests_running"] == 3 and longer["max_kv_cache_usage_perc"] == 0.5
    assert longer["server_series"]["num_requests_running"] == [3]


def test_a_rate_that_was_not_held_is_reported():
    """Requests were due after 1, 2 and 3 s, and the last was sent after 4."""
    answers = [
        TimedAnswer(due=10.0 + due, sent=10.0 + sent) for due, sent in ((1, 1), (2, 2), (3, 4))
    ]
    rate = rate_held(answers, 10.0)
    assert rate == {
        "drawn_request_rate": 1.0,
        "sent_request_rate": 0.75,
        "max_lateness_ms": 1000.0,
        "request_rate_held": False,
    }
    [note] = rate_notes(rate)
    assert "not held: 1.00 requests/s arrived, 0.75 were sent, up to 1000 ms late" in note
    held = rate_held(answers[:2], 10.0)
    assert held["request_rate_held"] and not rate_notes(held)
    assert rate_held([TimedAnswer(due=10.0, sent=11.0)], 10.0) == {}, "all at once"


METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running 3
# TYPE jaxpage_kv_cache_usage_perc gauge
jaxpage_kv_cache_usage_perc{{model="a"}} {usage}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{model="a"}} {usage}
# TYPE jaxpage_num_preemptions counter
jaxpage_num_preemptions_total{{mode="swap"}} {preemptions}
jaxpage_num_preemptions_total{{mode="recompute"}} 1
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total {queries}
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total {hits}
"""


def test_what_the_servers_metrics_say(server, capsys, tmp_path):
    server.metrics = [
        METRICS.format(usage=0.5, preemptions=2, queries=10, hits=5),
        METRICS.format(usage=0.25, preemptions=5, queries=50, hits=15),
    ]
    path = tmp_path / "rates.svg"
    rates = ["--request-rate", "100", "1000", "--goodput", "ttft:60000", "--plot", str(path)]
    result = bench(server, "--num-prompts", "3", *rates, capsys=capsys)
    assert result["num_preemptions"] == 3 and result["prefix_cache_hit_rate"] == 0.25
    assert result.get("mean_kv_cache_usage_perc", 0.25) == 0.25, "if there was a look in between"
    assert "draft_acceptance_rate" not in result and "compiles_during_run" not in result
    assert [each["request_rate"] for each in result["sweep"]] == [100, 1000]
    assert (
        result["request_goodput"] == result["request_throughput"]
        and result["arrivals"] == "poisson"
    )
    assert result["request_rate_held"] in (True, False) and path.read_text().count("requests/s") > 0


# ---- the client


def test_the_rounds_of_a_chat_go_on_from_the_answers(server, capsys):
    result = bench(
        server, "--dataset", "chat", "--num-rounds", "2", "--num-prompts", "6", capsys=capsys
    )
    _, *bodies = server.bodies
    firsts = [
        tuple([*body["prompt"], *[7] * body["max_tokens"]])
        for body in bodies
        if len(body["prompt"]) < 3
    ]
    seconds = [body for body in bodies if len(body["prompt"]) >= 3]
    assert result["completed"] == 6 and len(firsts) == len(seconds) == 3
    assert all(
        any(tuple(body["prompt"][: len(first)]) == first for first in firsts) for body in seconds
    )


def test_a_server_without_extensions_is_measured_too(server, capsys):
    server.is_plain = True
    result = bench(server, "--num-prompts", "2", "--max-concurrency", "1", capsys=capsys)
    assert result["completed"] == 2 and result["arrivals"] == "closed loop"
    assert {*server.bodies[-1]} == {
        "model",
        "prompt",
        "max_tokens",
        "temperature",
        "stream",
        "stream_options",
    }


def test_ratios_to_an_earlier_run(server, capsys, tmp_path):
    path = str(tmp_path / "baseline.json")
    first = bench(
        server, "--num-prompts", "3", "--repeats", "2", "--output-json", path, capsys=capsys
    )
    assert len(first["runs"]) == 2
    now = bench(server, "--num-prompts", "3", "--compare", path, capsys=capsys)
    ratio = now["compared"]["median_ttft_ms"]
    assert ratio["ratio"] == pytest.approx(now["median_ttft_ms"] / first["median_ttft_ms"])
    before = [run["median_ttft_ms"] for run in first["runs"]]
    assert ratio["lowest"] == pytest.approx(now["median_ttft_ms"] / max(before))
    assert ratio["highest"] == pytest.approx(now["median_ttft_ms"] / min(before))
    assert (
        now["config_hash"] == first["config_hash"]
        and now["environment_hash"] == first["environment_hash"]
    )
    words = [
        "bench",
        "serve",
        "--base-url",
        server.url,
        *SMALL,
        "--num-prompts",
        "4",
        "--compare",
        path,
    ]
    assert cli.main(words) == 2
    assert "that was other work: num_prompts 3, now 4" in capsys.readouterr().err
    for changes, said in (
        ({"runs": []}, "runs must have at least 1 item after validation, not 0, got []"),
        ({"runs": [{}]}, "the file has no 'runs.0.request_throughput'"),
        ({"median_ttft_ms": None}, "median_ttft_ms must be a valid number, got None"),
    ):
        Path(path).write_text(json.dumps({**first, **changes}))
        assert cli.main(words) == 2
        assert f"--compare {path}: {said}" in capsys.readouterr().err


def test_every_request_is_sent_and_counted(server, capsys, tmp_path):
    path = tmp_path / "result.json"
    result = bench(
        server, "--num-prompts", "9", "--seed", "3", "--output-json", str(path), capsys=capsys
    )
    warm_up, *bodies = server.bodies
    assert len(bodies) == result["completed"] == 9 and json.loads(path.read_text()) == result
    assert result["total_input_tokens"] == sum(len(body["prompt"]) for body in bodies)
    assert result["total_output_tokens"] == sum(body["max_tokens"] for body in bodies)
    assert all(
        body["stream"] and body["ignore_eos"] and body["temperature"] == 0 for body in bodies
    )
    assert {body["model"] for body in bodies} == {"a"} and all(
        max(body["prompt"]) < 50 for body in bodies
    )
    [salt] = {body["cache_salt"] for body in bodies}
    assert "cache_salt" not in warm_up and len(salt) == 32
    assert result["request_rate"] is None and "device" not in result["environment"]


def test_no_more_requests_at_a_time_than_asked_for(server, capsys):
    server.together = 3
    bench(server, "--num-prompts", "12", "--max-concurrency", "3", "--model", "b", capsys=capsys)
    assert server.maximum == 3 and server.bodies[-1]["model"] == "b"


@pytest.mark.parametrize("whole", [False, True])
def test_a_place_that_is_free_is_given_on_unless_batches_stay_whole(whole):
    async def run() -> list[list[int]]:
        places, admitted, seen = Places(2, whole=whole), [], []

        async def send(index: int) -> None:
            await places.take()
            admitted.append(index)

        tasks = [asyncio.ensure_future(send(index)) for index in range(5)]
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


def test_static_batches_wait_for_their_last(server, capsys):
    result = bench(
        server,
        "--num-prompts",
        "10",
        "--baseline",
        "static",
        "--baseline-batch-size",
        "4",
        capsys=capsys,
    )
    [static] = result["baselines"]
    assert (static["engine"], static["completed"]) == ("static batches of 4", 10)
    continuous, batches = server.bodies[1:11], server.bodies[11:]
    assert [body["prompt"] for body in batches] == [body["prompt"] for body in continuous], (
        "the same work"
    )
    assert {body["cache_salt"] for body in batches}.isdisjoint(
        body["cache_salt"] for body in continuous
    )
    log = [(what, index - 11) for what, index in server.log if index >= 11]
    for first in (0, 4, 8):
        batch = [(what, index) for what, index in log if first <= index < first + 4]
        assert log[: len(batch)] == batch, "a batch has ended before the next begins"
        log = log[len(batch) :]
    assert not log


def test_requests_arrive_at_the_rate_that_was_requested(server, capsys):
    """A run of 200 requests at 500 a second is not over before the last is due.

    A slow machine may take longer.
    """
    result = bench(
        server, "--num-prompts", "200", "--request-rate", "500", "--max-output", "1", capsys=capsys
    )
    assert result["duration"] > 0.3 and result["request_throughput"] < 650


def test_failures_are_counted_and_the_status_is_1(server, capsys):
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
    assert (
        asyncio.run(Client(server.url).complete({"prompt": [1], "max_tokens": 2}, 0.0)).error
        == "status 503"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--base-url", "ftp://x"), "--base-url must be a URL such as http://127.0.0.1:8000"),
        (("--base-url", "http://127.0.0.1:1"), "/v1/models of the server cannot be had"),
        (("--request-rate", "0"), "--request-rate must be more than 0, got 0.0"),
        (("--request-rate", "nan"), "--request-rate must be more than 0, got nan"),
        (("--burstiness", "-1"), "--burstiness must be more than 0"),
        (
            ("--burstiness", "0.5"),
            "--burstiness needs --request-rate: without it all requests come at once",
        ),
        (
            ("--output-json", "no/such/file"),
            "--output-json no/such/file: there is no such directory",
        ),
        (("--max-concurrency", "0"), "--max-concurrency must be at least 1, got 0"),
        (("--baseline", "orca"), "--baseline must be static, got 'orca'"),
        (
            ("--dataset", "mine"),
            "--dataset must be one of sharegpt, alpaca, random, prefix_repetition",
        ),
        (("--num-prompts", "0"), "--num-prompts must be at least 1"),
        (
            ("--goodput", "itl:5"),
            "--goodput takes NAME:MILLISECONDS with ttft, tpot, e2el, got 'itl:5'",
        ),
        (("--dataset", "custom"), "--dataset custom needs --dataset-path FILE"),
        (("--num-rounds", "2"), "--num-rounds goes with --dataset chat, not sharegpt"),
        (
            ("--request-rate", "1", "2", "--compare", "x"),
            "--baseline and --compare go with one --request-rate",
        ),
        (("--compare", "no.json"), "--compare no.json: No such file or directory"),
        (
            ("--compare", "tests/durations.json"),
            "the file has no 'request_throughput', so it is no result of `jaxpage bench serve",
        ),
    ],
)
def test_wrong_use_of_bench_serve(words, message, capsys):
    assert cli.main(["bench", "serve", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_server_that_cannot_be_measured(server, capsys):
    assert cli.main(["bench", "serve", "--base-url", server.url, "--model", "c"]) == 2
    assert "the server has no such model" in capsys.readouterr().err
    server.frames = [b"data: [DONE]\n\n"]
    assert cli.main(["bench", "serve", "--base-url", server.url]) == 2
    assert "the first request failed" in capsys.readouterr().err


# ---- latency


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("bench") / "llama", LLAMA)


@pytest.mark.usefixtures("compiled_when_used", "largest_shapes")
def test_latency_of_a_batch_and_of_other_settings_beside_it(model, capsys, tmp_path):
    words = [
        "--model",
        str(model),
        "--batch-size",
        "2",
        "--input-len",
        "8",
        "--output-len",
        "4",
        "--num-iters",
        "3",
    ]
    engine = ["--num-blocks", "17", "--max-num-seqs", "2", "--preemption-mode", "recompute"]
    assert (
        cli.main(["bench", "latency", *words, *engine, "--versus", "enable_prefix_caching=false"])
        == 0
    )
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert len(result["latencies"]) == 3 and result["avg_latency"] == pytest.approx(
        sum(result["latencies"]) / 3
    )
    assert (
        min(result["latencies"])
        <= result["percentiles"]["10"]
        <= result["percentiles"]["50"]
        <= max(result["latencies"])
    )
    assert [each["engine"] for each in result["baselines"]] == ["enable_prefix_caching=false"]
    assert result["effective_dtype"] == result["effective_kv_cache_dtype"] == "float32"
    assert "p99 (s)" in out and result["environment"]["device"].startswith("cpu")
    earlier = tmp_path / "earlier.json"
    slow = [2 * seconds for seconds in result["latencies"]]
    earlier.write_text(json.dumps({**result, "latencies": slow}))
    assert cli.main(["bench", "latency", *words, *engine, "--compare", str(earlier)]) == 0
    now = json.loads(capsys.readouterr().out.splitlines()[-1])
    spread = [before / seconds for before in slow for seconds in now["latencies"]]
    assert [now["compared"][key] for key in ("lowest", "highest")] == pytest.approx(
        [min(spread), max(spread)]
    )
    assert (
        cli.main(["bench", "latency", *words[:-1], "1", "--seed", "1", "--compare", str(earlier)])
        == 2
    )
    assert "that was other work: seed 0, now 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch-size", "0"), "--batch-size must be at least 1, got 0"),
        (("--num-iters-warmup", "-1"), "--num-iters-warmup must be at least 0, got -1"),
        (("--baseline", "orca"), "--baseline must be one of transformers, got 'orca'"),
        (("--versus", "model=other"), "--versus cannot change model"),
        (
            ("--compare", "tests/durations.json"),
            "the file has no 'latencies', so it is no result of `jaxpage bench latency",
        ),
    ],
)
def test_wrong_use_of_bench_latency(words, message, capsys):
    assert cli.main(["bench", "latency", *words]) == 2
    assert message in capsys.readouterr().err
