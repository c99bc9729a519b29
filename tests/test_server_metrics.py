"""Metrics and the server's log: Prometheus' parser reads the facts that `llm.stats()` has."""

from __future__ import annotations

import asyncio
import bisect
import json
import logging
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxpage import BeamSearchParams, SamplingParams
from jaxpage.assembly import Built
from jaxpage.engine.latencies import SECONDS, TOKENS, Histogram, Latencies
from jaxpage.errors import ModelNotFoundError
from jaxpage.memory import CacheObserver, PrefixIndex
from jaxpage.outputs import RequestMetrics
from jaxpage.serving import asgi
from jaxpage.serving.cache_events.kv_events import KVEvents
from jaxpage.serving.metrics import logs
from jaxpage.serving.metrics.metric_texts import HELP, LABELS
from jaxpage.serving.metrics.metrics import ABORTIONS, REJECTIONS, ServerMetrics
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.startup import publish_kv_events
from jaxpage.settings.from_vllm import answers
from jaxpage.step.request import Request, Sequence, SequenceGroup
from tests.support.engines import LLAMA, make_llm
from tests.support.random_checkpoints import random_checkpoint


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    speculation = {"method": "ngram", "num_speculative_tokens": 2}
    with make_llm(
        random_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA), speculative_config=speculation
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def outputs(llm):
    """Returns outputs of several kinds, some of which wait for others: all that `llm` ever had."""
    prompts = [list(range(1, 20 + 7 * index)) for index in range(7)]
    greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    params: list[Any] = [greedy] * 4
    params += [
        SamplingParams(n=3, max_tokens=5, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=1, ignore_eos=True),
    ]
    params += [BeamSearchParams(beam_width=2, max_tokens=4)]
    return llm.generate(prompts, params, use_tqdm=False)


# ---- histograms


@pytest.mark.parametrize("bounds", [SECONDS, TOKENS])
def test_bounds_rise_in_steps_of_one_two_five(bounds):
    shown = [float(bound) for bound in list(Histogram(bounds).snapshot()["buckets"])[:-1]]
    assert shown == sorted(set(shown)) and {f"{bound:e}"[0] for bound in shown} == {"1", "2", "5"}


def test_a_value_counts_in_every_bucket_that_holds_it():
    histogram, values = Histogram((1, 2, 5)), [0.5, 1, 1.5, 2, 2, 4, 5, 9, 0]
    for value in values:
        histogram.observe(value)
    assert histogram.snapshot() == {
        "buckets": {"1.0": 3, "2.0": 6, "5.0": 8, "+Inf": 9},
        "sum": sum(values),
        "count": len(values),
    }


def test_latencies_are_recounted_from_the_requests(llm, outputs):
    """Each request carries its times; the histograms are made of them again, with sums."""
    stats = llm.stats()
    requests = [output.metrics for output in outputs]
    tokens = [sum(len(each.token_ids) for each in output.outputs) for output in outputs]
    max_length = [max(len(each.token_ids) for each in output.outputs) for output in outputs]
    values_by_name = {
        "time_to_first_token_seconds": [m.first_token_time - m.arrival_time for m in requests],
        "e2e_request_latency_seconds": [m.finished_time - m.arrival_time for m in requests],
        "request_queue_time_seconds": [m.first_scheduled_time - m.arrival_time for m in requests],
        "request_prefill_time_seconds": [
            m.first_token_time - m.first_scheduled_time for m in requests
        ],
        "request_decode_time_seconds": [m.last_token_time - m.first_token_time for m in requests],
        "request_prompt_tokens": [len(output.prompt_token_ids) for output in outputs],
        "request_time_per_output_token_seconds": [
            (m.last_token_time - m.first_token_time) / (count - 1)
            for m, count in zip(requests, max_length, strict=True)
            if count > 1
        ],
    }
    for name, values in values_by_name.items():
        histogram = stats[name]
        assert histogram["count"] == len(values), name
        assert histogram["sum"] == pytest.approx(sum(values)), name
        values.sort()
        for bound, count in histogram["buckets"].items():
            assert count == bisect.bisect_right(values, float(bound)), (name, bound)
    assert stats["request_generation_tokens"]["count"] == len(outputs)
    assert stats["request_generation_tokens"]["sum"] >= sum(tokens), (
        "beams that fell out were generated too"
    )
    gaps = stats["inter_token_latency_seconds"]
    assert gaps["sum"] == pytest.approx(sum(values_by_name["request_decode_time_seconds"])), (
        "the gaps between tokens add up"
    )
    assert stats["engine_step_seconds"]["count"] == stats["engine_steps_total"] > gaps["count"] / 4
    assert all(
        m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.last_token_time
        for m in requests
    )


def test_what_is_aborted_has_no_latency(llm, outputs, by_hand):
    before = llm.stats()
    with llm.stream([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True)) as chunks:
        next(chunks)
    after = llm.stats()
    assert (
        after["request_success_total"]["abort"]
        == before["request_success_total"].get("abort", 0) + 1
    )
    assert (
        after["time_to_first_token_seconds"]["count"]
        == before["time_to_first_token_seconds"]["count"] + 1
    )
    assert after["e2e_request_latency_seconds"] == before["e2e_request_latency_seconds"]


# ---- Prometheus


def parse(text: bytes) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text.decode())}


def test_metrics_have_the_facts_of_stats(llm, outputs):
    stats = llm.stats()
    families = parse(ServerMetrics("my model").exposition(stats))
    samples = {
        (
            sample.name,
            *(value for name, value in sorted(sample.labels.items()) if name != "model_name"),
        ): sample
        for family in families.values()
        for sample in family.samples
    }
    assert len(samples) == sum(len(family.samples) for family in families.values()), (
        "no sample comes twice"
    )
    expected: dict[tuple[str, ...], float] = {}
    for name, value in stats.items():
        if isinstance(value, dict) and "buckets" in value:
            expected |= {
                (f"jaxpage_{name}_bucket", bound): count
                for bound, count in value["buckets"].items()
            }
            expected |= {
                (f"jaxpage_{name}_sum",): value["sum"],
                (f"jaxpage_{name}_count",): value["count"],
            }
        elif isinstance(value, dict):
            expected |= {(f"jaxpage_{name}", str(key)): number for key, number in value.items()}
        else:
            expected[(f"jaxpage_{name}",)] = value
    engine = {key: sample.value for key, sample in samples.items() if key in expected}
    assert engine == expected and stats["num_preemptions_total"] and stats["request_success_total"]
    assert all(samples[key].labels["model_name"] == "my model" for key in expected)
    names = {"jaxpage_rejected", "jaxpage_aborted", "jaxpage_build_info"}
    assert {name for name in families if not name.startswith("process_")} == names | {
        f"jaxpage_{name}"
        if name == "num_blocks_total"
        else f"jaxpage_{name}".removesuffix("_total")
        for name in stats
    }


def test_every_metric_says_what_it_is(llm, outputs):
    stats = llm.stats()
    assert {"rejected_total", "aborted_total", *stats} == set(HELP)
    labelled = {
        name for name, value in stats.items() if isinstance(value, dict) and "buckets" not in value
    }
    assert {"rejected_total", "aborted_total", *labelled} == set(LABELS)
    families = parse(ServerMetrics("m").exposition(stats))
    types = {name: family.type for name, family in families.items() if name.startswith("jaxpage_")}
    histograms = {
        f"jaxpage_{name}"
        for name, value in stats.items()
        if isinstance(value, dict) and "buckets" in value
    }
    assert {name for name, kind in types.items() if kind == "histogram"} == histograms
    assert types["jaxpage_num_blocks_total"] == types["jaxpage_num_requests_running"] == "gauge"
    assert types["jaxpage_compile"] == types["jaxpage_request_success"] == "counter"
    assert all(family.documentation for family in families.values())


def test_reasons_are_a_closed_set():
    metrics = ServerMetrics("m")
    size = len(metrics.exposition({}).splitlines())
    for index in range(1000):
        metrics.rejected(f"GET{index}")
        metrics.aborted(f"{index}\n")
    metrics.rejected("queue_full")
    families = parse(metrics.exposition({}))
    assert len(metrics.exposition({}).splitlines()) == size
    for name, reasons, counted in (
        ("rejected", REJECTIONS, {"other": 1000, "queue_full": 1}),
        ("aborted", ABORTIONS, {"other": 1000}),
    ):
        values = {
            sample.labels["reason"]: sample.value for sample in families[f"jaxpage_{name}"].samples
        }
        assert values == {**dict.fromkeys(reasons, 0), **counted}


def test_a_model_s_name_cannot_break_the_text():
    name = 'a"b\\c\nd'
    [sample] = parse(ServerMetrics(name).exposition({"engine_steps_total": 3}))[
        "jaxpage_engine_steps"
    ].samples
    assert (sample.labels["model_name"], sample.value) == (name, 3)


# ---- the log


@pytest.fixture
def log(capsys):
    """Configures the log and gives what was written since."""
    root, logger = logging.getLogger(), logging.getLogger("jaxpage")
    before = root.handlers[:], root.level, logger.level

    def configure(**settings: Any) -> Any:
        logs.configure(ServerConfig(**settings))
        return lambda: capsys.readouterr().err

    yield configure
    logging.captureWarnings(False)
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    logger.setLevel(before[2])


HOSTILE = "first\r\n12:00:00 ERROR forged\x1b[2J\u2028\x85 \x7f"


def test_a_record_is_a_line_whatever_stands_in_it(log):
    written = log()
    logging.getLogger("jaxpage.x").info("asked: %s", HOSTILE, extra={"request_id": HOSTILE})
    text = written()
    assert len(text.splitlines()) == 1 and "\x1b" not in text
    assert r"first\x0d\x0a12:00:00 ERROR forged\x1b[2J\x2028\x85 \x7f" in text


def test_no_line_of_a_traceback_looks_like_a_record(log):
    written = log()
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("jaxpage.x").exception("failed")
    first, *others = written().splitlines()
    assert (
        first.endswith("ERROR failed")
        and all(line.startswith("    ") for line in others)
        and len(others) >= 3
    )


def test_json_records_are_objects_line_by_line(log):
    written = log(log_json=True)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("jaxpage.x").warning(
            "asked: %s", HOSTILE, extra={"request_id": "a", "path": Path("b")}, exc_info=True
        )
    [line] = written().splitlines()
    record = json.loads(line)
    assert (
        record["message"] == f"asked: {HOSTILE}"
        and record["level"] == "warning"
        and record["logger"] == "jaxpage.x"
    )
    assert (
        record["request_id"] == "a"
        and record["path"] == "b"
        and "ValueError" in record["exception"]
    )
    assert abs(record["time"] - time.time()) < 600


def test_the_level_is_that_of_jaxpage_alone(log):
    written = log(log_level="error")
    logging.getLogger("jaxpage.x").warning("not this")
    logging.getLogger("jaxpage.x").error("this")
    written_text = written()
    assert "not this" not in written_text and "this" in written_text
    written = log(log_level="debug")
    logging.getLogger("jaxpage.x").debug("ours")
    logging.getLogger("somebody.else").info("theirs")
    assert written().count("\n") == 1


def test_activity_is_reported_once_and_only_where_there_is_some(llm, outputs):
    before = llm.stats()
    assert logs.activity(before, llm.stats(), 10.0) is None
    llm.generate(
        [[5, 6, 7, 8] * 8] * 2,
        SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True),
        use_tqdm=False,
    )
    after = llm.stats()
    line = logs.activity(before, after, 2.0)
    assert line is not None and line.startswith("Running 0 · Waiting 0 · KV 0.0% · prefill ")
    computed = after["prompt_tokens_total"] - before["prompt_tokens_total"]
    assert f"prefill {computed / 2:.0f} tok/s · decode 10 tok/s · prefix hit " in line
    waiting = {**after, "num_requests_waiting": 2}
    assert "Waiting 2" in str(logs.activity(waiting, waiting, 10.0)), (
        "a queue that does not move is something"
    )
    busy = {
        **after,
        "prompt_tokens_total": after["prompt_tokens_total"] + 81_230,
        "engine_steps_total": 10**6,
    }
    assert "prefill 8.1k tok/s" in str(logs.activity(after, busy, 10.0))


def test_the_log_has_a_line_per_active_interval(log):
    """The second and the third of four snapshots differ: one line."""
    written = log()
    quiet = {name: 0 for name in HELP}
    snapshots = iter(
        [quiet, quiet, quiet | {"engine_steps_total": 5}, quiet | {"engine_steps_total": 5}]
    )

    async def stats() -> dict[str, Any]:
        try:
            return next(snapshots)
        except StopIteration:
            raise asyncio.CancelledError from None

    async def run() -> None:
        with pytest.raises(asyncio.CancelledError):
            await logs.log_activity(stats, seconds=0.001)

    asyncio.run(run())
    assert written().count("Running 0") == 1


def test_latencies_of_a_failed_request_are_left_out():
    request = Request(
        request_id="a",
        prompt=None,
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(n=2),
        seed=0,
        eos_token_ids=frozenset(),
        max_total_tokens=9,
    )
    for reasons, counted in (
        (("stop", "length"), 1),
        (("stop", "error"), 0),
        (("abort",), 0),
        ((None,), 0),
    ):
        latencies = Latencies()
        metrics = RequestMetrics(arrival_time=0.0, first_scheduled_time=1.0, finished_time=9.0)
        latencies.has_tokens(metrics, 2.0)
        latencies.has_tokens(metrics, 5.0)
        sequences = [Sequence(index, index, 3, [1, 2, 3, 4, 5]) for index in range(len(reasons))]
        for sequence, reason in zip(sequences, reasons, strict=True):
            sequence.finish_reason = reason
        latencies.finished(SequenceGroup(request, sequences), metrics)
        assert latencies.snapshot()["e2e_request_latency_seconds"]["count"] == counted
        assert latencies.snapshot()["inter_token_latency_seconds"]["sum"] == 3.0


# ---- what routers read


def test_routers_and_dashboards_find_vllms_names(llm, outputs):
    """The endpoint picker of the Gateway API reads the gauges, vLLM's dashboard the others, too."""
    stats = llm.stats()
    families = parse(ServerMetrics("m", 16).exposition(stats))
    theirs = {name: family for name, family in families.items() if name.startswith("vllm:")}
    same = {name for name, answer in answers("metrics").items() if answer.kind == "same"}
    assert theirs.keys() == {
        "vllm:cache_config_info",
        *(f"vllm:{name.removesuffix('_total')}" for name in same),
    }
    (cache,) = theirs.pop("vllm:cache_config_info").samples
    assert cache.labels == {
        "model_name": "m",
        "block_size": "16",
        "num_gpu_blocks": str(stats["num_blocks_total"]),
    }
    (preemptions,) = theirs.pop("vllm:num_preemptions").samples
    assert preemptions.value == sum(stats["num_preemptions_total"].values())
    for name, family in theirs.items():
        own_family = families[f"jaxpage_{name.removeprefix('vllm:')}"]
        assert family.type == own_family.type
        assert [(each.labels, each.value) for each in family.samples] == [
            (each.labels, each.value) for each in own_family.samples
        ]


@pytest.mark.parametrize("following", [0, 1])
def test_events_of_an_index(following):
    """A block takes those following it along, and nothing is told of a salt, nor of a token that
    follows.
    """
    batches: list[Any] = []
    index, events = PrefixIndex(2, num_following=following), KVEvents(2, batches.append)
    index.observer = events
    tokens, others = [1, 2, 3, 4, 5, 6, 0], [7, 8, 9, 9, 0]
    digests = index.extend([], tokens, None, 3)
    for block, parent in ((4, None), (5, 4), (6, 5)):
        index.register(block, digests[block - 4], parent, index.content(tokens, block - 4))
    salted = index.extend([], others, "salt", 2)
    index.register(7, salted[0], "salt", index.content(others, 0))
    index.register(8, salted[1], 7, index.content(others, 1))
    events.prefix_cache_reset()
    index.forget(5)
    index.forget(7)
    events.pages_rebuilt()
    events.pages_rebuilt()
    [(_, [stored], _), (_, [removed], _)] = batches
    first, *following = hashes = [int.from_bytes(digest[:8], "big") for digest in digests]
    assert (stored["block_hashes"], stored["parent_block_hash"]) == (hashes, None)
    assert stored["token_ids"] == [1, 2, 3, 4, 5, 6]
    assert (
        removed == {"type": "BlockRemoved", "block_hashes": following, "medium": "GPU"}
        and first not in following
    )


def free_endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def test_subscribers_know_what_the_cache_will_find(llm):
    """They put it together from the events alone, through evictions.

    Salted prefixes are left out, and what was missed is sent again.
    """
    zmq, msgpack = pytest.importorskip("zmq"), pytest.importorskip("msgpack")
    rng, engine = np.random.default_rng(0), llm._engine
    built, before = Built(engine, None, {}, llm.spec, llm._model), engine.events
    cached = engine.scheduler.block_manager.cached
    assert cached is not None
    llm.reset_prefix_cache()
    endpoint, replaying = free_endpoint(), free_endpoint()
    publish_kv_events(
        built, ServerConfig(kv_events=endpoint, kv_events_replay=replaying, kv_events_topic="kv@a")
    )
    known: dict[tuple[int, ...], int] = {}  # whole prefixes and their hashes
    num_removed = 0

    def follow(event: dict[str, Any]) -> None:
        nonlocal num_removed
        if event["type"] == "BlockStored":
            parents = {block_hash: prefix for prefix, block_hash in known.items()}
            prefix = (
                parents[event["parent_block_hash"]]
                if event["parent_block_hash"] is not None
                else ()
            )
            for index, block_hash in enumerate(event["block_hashes"]):
                prefix += tuple(event["token_ids"][16 * index : 16 * index + 16])
                known[prefix] = block_hash
            assert (event["block_size"], event["medium"], len(event["token_ids"])) == (
                16,
                "GPU",
                16 * (index + 1),
            )
        else:
            gone = set(event.get("block_hashes", known.values()))
            assert gone <= set(known.values())
            num_removed += len(gone)
            for prefix in [prefix for prefix, block_hash in known.items() if block_hash in gone]:
                del known[prefix]

    def find_missing(asking: Any, first: int) -> list[bytes]:
        asking.send_multipart([b"", first.to_bytes(8, "big")])
        events = []
        while (actual := asking.recv_multipart()[1:])[0] != b"\xff" * 8:
            assert int.from_bytes(actual[0], "big") == first + len(events)
            events.append(actual[1])
        return events

    def generate(*prompts: list[int], **params: Any) -> list[int]:
        outputs = llm.generate(
            list(prompts), SamplingParams(max_tokens=2, **params), use_tqdm=False
        )
        return [output.metrics.num_cached_tokens for output in outputs if output.metrics]

    with (
        zmq.Context() as context,
        context.socket(zmq.SUB) as reading,
        context.socket(zmq.DEALER) as asking,
    ):
        reading.connect(endpoint)
        asking.connect(replaying)
        for each in (reading, asking):
            each.rcvtimeo = 20_000
        reading.subscribe(b"kv@")
        seen = []
        while not seen:  # until the connection stands
            generate(rng.integers(1, 257, 40).tolist())
            seen = [reading.recv_multipart()] if reading.poll(100) else []
        prefix = rng.integers(1, 257, 40).tolist()
        prompts = [
            prefix[: 8 * rng.integers(6)] + rng.integers(1, 257, 60).tolist() for _ in range(50)
        ]
        secret = [256] * 70
        generate(*prompts[:30])
        generate(secret, cache_salt="mine")
        generate(*prompts[30:])
        num_seen, hits = 0, []
        for probe in [*prompts[-12:], *prompts[:6], secret]:
            batches = find_missing(asking, num_seen)
            num_seen += len(batches)
            for sent_at, events, rank in map(msgpack.unpackb, batches):
                assert abs(sent_at - time.time()) < 600 and rank == 0
                for event in events:
                    follow(event)
            expected = 0
            while expected + 16 < len(probe) and tuple(probe[: expected + 16]) in known:
                expected += 16
            hits.append(expected)
            assert generate(probe) == [expected]
        assert num_removed and max(hits) >= 32 and hits[-1] == 0, "nothing was evicted, or found"
        llm.reset_prefix_cache()
        while True:
            topic, place, batch = reading.recv_multipart()
            assert topic == b"kv@a" and int.from_bytes(place, "big") > int.from_bytes(
                seen[-1][1], "big"
            )
            seen.append([topic, place, batch])
            if msgpack.unpackb(batch)[1] == [{"type": "AllBlocksCleared"}]:
                break
        asking.send_multipart([b"", b"not a number"])  # it is passed over
    engine.events.closed()
    engine.events, cached.index.observer = before, CacheObserver()


def test_the_application_runs_in_the_servers_of_others(llm, tmp_path, monkeypatch):
    """The lifespan of ASGI ends its engine."""
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        asgi.asgi_app(
            engine={"model": str(tmp_path / "nowhere")}, server={"served_model_name": "m"}
        )
    built = Built(llm._engine, None, {}, llm.spec, llm._model)
    app = asgi.application(built, llm.config, ServerConfig(served_model_name="m"))
    # the engine is there for other tests
    monkeypatch.setattr(app._driver.turns, "close_engine", lambda: None)
    said: list[str] = []

    async def run() -> None:
        messages: asyncio.Queue[Any] = asyncio.Queue()
        lifespan = asyncio.create_task(
            app({"type": "lifespan"}, messages.get, lambda event: hear(event["type"]))
        )
        await messages.put({"type": "lifespan.startup"})
        requested = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 2}
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.post("/v1/completions", json=requested)).status_code == 200
        await messages.put({"type": "lifespan.shutdown"})
        await lifespan

    async def hear(event: str) -> None:
        said.append(event)

    asyncio.run(run())
    assert (
        said == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        and not app._driver.healthy
    )
