"""Spans of OpenTelemetry: the SDK's exporter in memory is the oracle of their form, usage and
`/metrics` of their numbers.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.routing import Route

import jaxpage
from jaxpage.assembly import Built
from jaxpage.errors import ConfigError
from jaxpage.outputs import RequestMetrics
from jaxpage.serving.dialects.registry import DIALECTS
from jaxpage.serving.metrics.tracing import OPERATIONS, RequestRecord, Traced, open_tracing
from jaxpage.serving.settings.server_config import ServerConfig
from tests.support.executables import when_used
from tests.support.running import Running, demo_engine, serving, wait_until

NEEDS = "spans need the extra [otel]"
pytest.importorskip("opentelemetry.sdk", reason=NEEDS)
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=NEEDS)

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # noqa: E402
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import ReadableSpan  # noqa: E402
from opentelemetry.sdk.trace.export import SpanExportResult  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # noqa: E402
    InMemorySpanExporter,
)
from opentelemetry.trace import SpanKind, StatusCode  # noqa: E402

from jaxpage.serving.metrics import otlp  # noqa: E402

ENDPOINT = "http://127.0.0.1:9/v1/traces"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PHASES = ["queue", "prefill", "decode"]
# Longer than a block, so that a second request finds it in the cache.
TEXT = "Once upon a time there lived a girl in an old house, and the girl had a cat and a dog"
PROMPT = {"model": "demo", "prompt": TEXT, "temperature": 0}
DRAWN = {**PROMPT, "max_tokens": 12, "ignore_eos": True}
pytestmark = pytest.mark.usefixtures("largest_shapes")
CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Once upon a time"}],
    "max_tokens": 5,
}


@pytest.fixture(scope="module", autouse=True)
def _loggers():
    """Resets what `open_spans` sets for a server's process, for the other tests of this one."""
    logger = logging.getLogger("opentelemetry")
    before = logger.level
    yield
    logger.setLevel(before)


class Kept:
    """A server whose spans stay in memory."""

    def __init__(self, server: Running, exporter: InMemorySpanExporter) -> None:
        self.server = server
        self.exporter = exporter
        self.client = httpx.Client(base_url=server.address, timeout=300)

    def spans(self, number: int) -> list[ReadableSpan]:
        """Waits for so many spans of servers, and forgets them with their children."""
        provider = self.server.app.state.tracing._provider

        def servers() -> int:
            provider.force_flush()
            return sum(span.kind is SpanKind.SERVER for span in self.exporter.get_finished_spans())

        wait_until(lambda: servers() >= number, f"{number} requests have spans")
        spans = list(self.exporter.get_finished_spans())
        self.exporter.clear()
        assert sum(span.kind is SpanKind.SERVER for span in spans) == number
        return spans

    def stats(self) -> dict[str, Any]:
        return self.server.loop.call(lambda engine: engine.stats()).result(60)


@contextlib.contextmanager
def keep_spans(demo_build: Built, **settings: Any) -> Iterator[Kept]:
    exporter = InMemorySpanExporter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(otlp, "OTLPSpanExporter", lambda endpoint: exporter)
        with serving(demo_build, otlp_traces_endpoint=ENDPOINT, **settings) as server:
            spans = Kept(server, exporter)
            yield spans
            spans.client.close()


class Shared:
    """An engine with one server at a time: one whose spans are kept, until a test wants its own.

    The engine drafts, and its pool is small enough for preemptions.
    """

    def __init__(self) -> None:
        drafting = {"method": "ngram", "num_speculative_tokens": 2}
        self.built = demo_engine(num_blocks=17, max_model_len=256, speculative_config=drafting)
        self._stack = contextlib.ExitStack()
        self._kept: Kept | None = None

    def kept(self) -> Kept:
        if self._kept is None:
            self._kept = self._stack.enter_context(keep_spans(self.built))
        return self._kept

    def close(self) -> None:
        self._kept = None
        self._stack.close()


@pytest.fixture(scope="module")
def engine():
    with when_used():
        shared = Shared()
        yield shared
        shared.close()
    shared.built.engine.runner.close()


@pytest.fixture
def keeping_server(engine):
    return engine.kept()


@pytest.fixture
def demo_build(engine):
    """Gives an engine to a test that makes a server of its own."""
    engine.close()
    return engine.built


def bare_scope() -> dict[str, Any]:
    about = {"type": "http", "method": "POST", "path": "/v1/completions"}
    return {**about, "headers": [], "state": {}}


def server_span(spans: list[ReadableSpan]) -> ReadableSpan:
    [span] = [span for span in spans if span.kind is SpanKind.SERVER]
    return span


def seconds(span: ReadableSpan) -> float:
    return (span.end_time - span.start_time) / 1e9


# ---- what spans say


BODIES: dict[str, tuple[str, dict[str, Any], int]] = {  # with the number of prompts
    "completion": ("/v1/completions", DRAWN, 1),
    "two outputs": ("/v1/completions", {**DRAWN, "n": 2, "temperature": 1.0, "seed": 3}, 1),
    "best of three": ("/v1/completions", {**DRAWN, "best_of": 3, "temperature": 1.0}, 1),
    "two prompts": ("/v1/completions", {**DRAWN, "prompt": ["The old house", "A cat"]}, 2),
    "stream": ("/v1/completions", {**DRAWN, "n": 2, "temperature": 1.0, "stream": True}, 1),
    "chat": ("/v1/chat/completions", CHAT, 1),
    "message": ("/v1/messages", CHAT, 1),
    "response": ("/v1/responses", {"model": "demo", "input": "A cat", "max_output_tokens": 4}, 1),
    "ollama": (
        "/api/generate",
        {"model": "demo", "prompt": "A cat", "stream": False, "options": {"num_predict": 4}},
        1,
    ),
    "score": ("/v1/score", {"model": "demo", "prompt": "A", "continuation": " cat"}, 1),
}


def usage_of(path: str, body: dict[str, Any], client: httpx.Client) -> dict[str, Any]:
    """Returns the numbers of an answer under OpenAI's names, and its finish reasons."""
    if body.get("stream"):
        body = {**body, "stream_options": {"include_usage": True}}
        text = client.post(path, json=body).raise_for_status().text
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        events = [json.loads(line) for line in lines]
        reasons = {
            choice["index"]: choice["finish_reason"]
            for event in events
            for choice in event["choices"]
            if choice["finish_reason"]
        }
        return {**events[-1]["usage"], "reasons": [reasons[index] for index in sorted(reasons)]}
    answer = client.post(path, json=body).raise_for_status().json()
    token_counts = answer.get("usage", answer)
    names = {
        "prompt_tokens": ("prompt_tokens", "input_tokens", "prompt_eval_count"),
        "completion_tokens": ("completion_tokens", "output_tokens", "eval_count"),
    }
    usage = {
        name: next((token_counts[each] for each in theirs if each in token_counts), None)
        for name, theirs in names.items()
    }
    if path == "/v1/messages":  # Anthropic counts cached tokens apart
        usage["prompt_tokens"] += token_counts.get("cache_read_input_tokens") or 0
    reasons = [choice["finish_reason"] for choice in answer.get("choices", [])]
    return {**token_counts, **usage, "reasons": reasons, "answer": answer}


@pytest.mark.parametrize("name", BODIES)
def test_spans_have_the_numbers_of_the_answer(keeping_server, name):
    path, body, num_prompts = BODIES[name]
    before = keeping_server.stats()
    usage = usage_of(path, body, keeping_server.client)
    spans = keeping_server.spans(1)
    after = keeping_server.stats()
    server = server_span(spans)
    attributes = dict(server.attributes)
    assert server.name == f"{OPERATIONS[path]} demo" and server.parent is None
    assert attributes["http.response.status_code"] == 200 and "error.type" not in attributes
    assert server.status.status_code is StatusCode.UNSET
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "demo"
    assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    if usage.get("completion_tokens") is not None:
        assert attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    if (details := usage.get("prompt_tokens_details")) is not None:
        assert attributes["gen_ai.usage.cache_read.input_tokens"] == details["cached_tokens"]
        if name == "two outputs":
            assert details["cached_tokens"] > 0
    if usage["reasons"]:
        assert list(attributes["gen_ai.response.finish_reasons"]) == usage["reasons"]
    assert attributes["jaxpage.drafts"] == (
        after["spec_decode_num_drafts_total"] - before["spec_decode_num_drafts_total"]
    )
    # The times are those of `/metrics`, and follow each other without a gap.
    for phase in PHASES:
        histogram = f"request_{phase}_time_seconds"
        measured = after[histogram]["sum"] - before[histogram]["sum"]
        ours = [span for span in spans if span.name == phase]
        assert sum(map(seconds, ours)) == pytest.approx(measured, abs=1e-5)
        assert [span.attributes["jaxpage.prompt.index"] for span in ours] == [*range(num_prompts)]
    assert len(spans) == 1 + 3 * num_prompts
    for index in range(num_prompts):
        parts = [span for span in spans if span.attributes.get("jaxpage.prompt.index") == index]
        assert [span.name for span in parts] == PHASES
        moments = [server.start_time, parts[0].start_time]
        for part in parts:
            assert part.parent == server.context and part.start_time == moments[-1]
            moments.append(part.end_time)
        assert moments == sorted(moments) and moments[-1] <= server.end_time


def test_no_text_of_a_request_is_in_its_spans(keeping_server):
    answer = keeping_server.client.post("/v1/completions", json=DRAWN).json()
    spans = keeping_server.spans(1)
    text = "".join(span.to_json() for span in spans)
    assert "Once" not in text and answer["choices"][0]["text"].strip() not in text
    assert server_span(spans).attributes["gen_ai.response.id"] == answer["id"]


def test_preemptions_and_drafts_are_those_of_the_engine(keeping_server):
    """Four requests that do not fit together; each number is in the spans of one of them."""
    names = {
        "jaxpage.preemptions": "num_preemptions_total",
        "jaxpage.drafts": "spec_decode_num_drafts_total",
        "jaxpage.draft_tokens": "spec_decode_num_draft_tokens_total",
        "jaxpage.accepted_tokens": "spec_decode_num_accepted_tokens_total",
        "gen_ai.usage.output_tokens": "generation_tokens_total",
    }

    def totals() -> dict[str, float]:
        stats = keeping_server.stats()
        values = {name: stats[theirs] for name, theirs in names.items()}
        return {
            name: sum(value.values()) if isinstance(value, dict) else value
            for name, value in values.items()
        }

    async def ask_all() -> None:
        body = {**DRAWN, "max_tokens": 100}
        async with httpx.AsyncClient(base_url=keeping_server.server.address, timeout=300) as client:
            prompts = [f"{index} {DRAWN['prompt']}" for index in range(4)]
            requested = [
                client.post("/v1/completions", json={**body, "prompt": each}) for each in prompts
            ]
            for answer in await asyncio.gather(*requested):
                answer.raise_for_status()

    before = totals()
    asyncio.run(ask_all())
    servers = [span for span in keeping_server.spans(4) if span.kind is SpanKind.SERVER]
    sums = {name: sum(span.attributes[name] for span in servers) for name in names}
    assert sums == {name: value - before[name] for name, value in totals().items()}
    assert min(sums.values()) > 0, sums


def test_embeddings_and_ranks_have_the_tokens_that_they_read(keeping_server):
    requested = {"model": "demo", "input": ["A cat", "The old house"]}
    usage = keeping_server.client.post("/v1/embeddings", json=requested).json()["usage"]
    [span] = keeping_server.spans(1)
    assert span.name == "embeddings demo"
    assert span.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    requested = {"model": "demo", "query": "A cat", "documents": ["A dog", "The old house"]}
    usage = keeping_server.client.post("/v1/rerank", json=requested).json()["usage"]
    [span] = keeping_server.spans(1)
    assert span.name == "rerank demo"
    assert span.attributes["gen_ai.usage.input_tokens"] == usage["total_tokens"]


def test_a_dialect_says_what_each_of_its_paths_does():
    for dialect in DIALECTS:
        assert dialect.operations.items() <= OPERATIONS.items()


def test_every_path_of_a_model_has_an_operation(keeping_server):
    routes = [route for route in keeping_server.server.server.routes if isinstance(route, Route)]
    posts = {route.path for route in routes if "POST" in (route.methods or ())}
    assert posts - set(OPERATIONS) == {
        "/v1/messages/count_tokens",
        "/api/show",
        "/tokenize",
        "/detokenize",
    }
    assert set(OPERATIONS) <= posts
    keeping_server.client.post(
        "/tokenize", json={"model": "demo", "prompt": "A"}
    ).raise_for_status()
    keeping_server.client.get("/health")
    keeping_server.client.post("/v1/completions", json={**DRAWN, "max_tokens": 1})
    keeping_server.spans(1)


# ---- the caller's span


@pytest.mark.parametrize(
    ("header", "has_parent"),
    [
        (f"00-{TRACE}-{PARENT}-01", "child"),
        (f"00-{TRACE}-{PARENT}-00", "none"),  # the caller does not sample
        (f"00-{TRACE}-{PARENT[:-1]}-01", "root"),
        (f"00-{'0' * 32}-{PARENT}-01", "root"),
        (f"ff-{TRACE}-{PARENT}-01", "root"),
        (f"00-{TRACE}-{PARENT}-01-more", "root"),
        ("x" * 4000, "root"),
        (None, "root"),
    ],
)
def test_the_span_is_a_child_of_the_caller_s(keeping_server, header, has_parent):
    headers = {} if header is None else {"traceparent": header, "tracestate": "vendor=1"}
    requested = {**DRAWN, "max_tokens": 2}
    keeping_server.client.post(
        "/v1/completions", json=requested, headers=headers
    ).raise_for_status()
    if has_parent == "none":
        keeping_server.client.post("/v1/completions", json=requested).raise_for_status()
        assert f"{server_span(keeping_server.spans(1)).context.trace_id:032x}" != TRACE
        return
    spans = keeping_server.spans(1)
    server = server_span(spans)
    if has_parent == "child":
        assert f"{server.parent.span_id:016x}" == PARENT and server.parent.is_remote
        assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
        assert server.context.trace_state.get("vendor") == "1"
    else:
        assert server.parent is None and f"{server.context.trace_id:032x}" != TRACE
    assert len(spans) == 4


# ---- requests that do not end well


def test_a_client_that_leaves_has_a_span_of_what_was_done(keeping_server):
    requested = {**DRAWN, "max_tokens": 200, "stream": True}
    with keeping_server.client.stream("POST", "/v1/completions", json=requested) as answer:
        next(answer.iter_lines())
    spans = keeping_server.spans(1)
    server = server_span(spans)
    assert server.attributes["error.type"] == "disconnect"
    assert server.status.status_code is StatusCode.UNSET, "the server is not at fault"
    assert list(server.attributes["gen_ai.response.finish_reasons"]) == ["abort"]
    assert 1 <= server.attributes["gen_ai.usage.output_tokens"] < 200
    parts = [span for span in spans if span is not server]
    assert [span.name for span in parts] == PHASES
    assert all(server.start_time <= part.start_time <= part.end_time for part in parts)
    assert parts[-1].end_time <= server.end_time


@pytest.mark.parametrize(
    ("change", "status", "name"),
    [
        ({"model": "other"}, 404, "POST /v1/completions"),
        ({"temperature": -1}, 400, "POST /v1/completions"),
        ({"prompt": "cat " * 300}, 400, "text_completion demo"),  # it is read, then refused
    ],
)
def test_a_refused_request_has_a_span(keeping_server, change, status, name):
    answer = keeping_server.client.post("/v1/completions", json={**DRAWN, **change})
    assert answer.status_code == status
    [span] = keeping_server.spans(1)
    assert (span.name, span.attributes["error.type"]) == (name, str(status))
    assert span.attributes["http.response.status_code"] == status
    assert span.attributes["jaxpage.request.id"] == answer.headers["x-request-id"]
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_step_is_an_error_of_the_server(keeping_server, stream, monkeypatch):
    engine = keeping_server.server.engine
    step = engine.step
    num_steps = 0

    def failing() -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 4:
            raise RuntimeError("planted")
        return step()

    monkeypatch.setattr(engine, "step", failing)
    requested = {**DRAWN, "max_tokens": 100, "stream": stream}
    answer = keeping_server.client.post("/v1/completions", json=requested)
    assert answer.status_code == (200 if stream else 500)
    spans = keeping_server.spans(1)
    server = server_span(spans)
    assert server.status.status_code is StatusCode.ERROR
    assert server.attributes["error.type"] == ("error" if stream else "500")
    assert [span.name for span in spans if span is not server][:2] == PHASES[:2]
    keeping_server.server.errors.clear()


@pytest.mark.parametrize("num_known", [1, 2, 3, 4])
def test_a_part_that_was_cut_short_ends_with_the_request(num_known):
    """The engine may know any of its times when the request ends."""
    times = ["arrival_time", "first_scheduled_time", "first_token_time", "last_token_time"]
    record = RequestRecord(bare_scope())
    moments = [record.began + each for each in range(1, 5)]
    known = dict(zip(times[:num_known], moments, strict=False))
    request = SimpleNamespace(token_ids=(1,), params=None)
    metrics = RequestMetrics(**known)
    record.submitted([SimpleNamespace(metrics=metrics, request=request)])  # type: ignore[list-item]
    record.ended = record.began + 60
    parts = list(record.phases())
    assert [part.name for part in parts] == PHASES[: min(num_known, 3)]
    assert [part.began for part in parts] == moments[: len(parts)]
    ends = [*moments[1:num_known], record.ended][: len(parts)]
    assert [part.ended for part in parts] == ends


def test_a_writer_that_fails_does_not_fail_the_request(caplog):
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def write(record: RequestRecord) -> None:
        raise RuntimeError("planted")

    sent: list[str] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    spans: Any = SimpleNamespace(write=write)
    asyncio.run(Traced(answer, spans)(bare_scope(), None, send))  # type: ignore[arg-type]
    assert len(sent) == 2 and "cannot be written" in caplog.text


# ---- the endpoint


class Receiver:
    """Receives OTLP over HTTP, and reads its protocol buffers."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[Any] = []
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.headers.append(dict(self.headers))
                outer.requests.append(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(outer.status)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver():
    receiver = Receiver()
    yield receiver
    receiver.close()


def test_spans_arrive_by_otlp_at_the_latest_at_the_shutdown(demo_build, receiver, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=seven")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    with serving(demo_build, otlp_traces_endpoint=receiver.endpoint) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        answer = httpx.post(
            f"{server.address}/v1/completions", json=DRAWN, headers=headers, timeout=300
        ).json()
        assert not receiver.requests
    [request] = receiver.requests
    assert receiver.headers[0]["x-tenant"] == "seven"
    [resource_spans] = request.resource_spans
    resource = {each.key: each.value.string_value for each in resource_spans.resource.attributes}
    assert resource["service.name"] == "jaxpage"
    assert resource["deployment.environment.name"] == "test"
    [scope_spans] = resource_spans.scope_spans
    spans = {span.name: span for span in scope_spans.spans}
    server_s = spans.pop("text_completion demo")
    assert (server_s.trace_id.hex(), server_s.parent_span_id.hex()) == (TRACE, PARENT)
    assert sorted(spans) == sorted(PHASES)
    assert {span.parent_span_id for span in spans.values()} == {server_s.span_id}
    attributes = {each.key: each.value for each in server_s.attributes}
    usage = answer["usage"]
    assert attributes["gen_ai.usage.input_tokens"].int_value == usage["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"].int_value == usage["completion_tokens"]
    [reason] = attributes["gen_ai.response.finish_reasons"].array_value.values
    assert reason.string_value == answer["choices"][0]["finish_reason"]


@pytest.mark.parametrize(
    ("name", "value", "number"),
    [
        ("OTEL_SDK_DISABLED", "true", 0),
        ("OTEL_TRACES_SAMPLER", "always_off", 0),
        ("OTEL_SERVICE_NAME", "theirs", 1),
    ],
)
def test_the_sdk_reads_its_own_variables(name, value, number, monkeypatch):
    monkeypatch.setenv(name, value)
    exporter = InMemorySpanExporter()
    spans = otlp.Spans(exporter)
    spans.write(RequestRecord(bare_scope()))
    spans.close()
    written = exporter.get_finished_spans()
    assert [span.resource.attributes["service.name"] for span in written] == [value] * number


@pytest.mark.parametrize("kind", ["closed", "silent", "refusing"])
def test_an_endpoint_that_does_not_answer_costs_one_warning(
    demo_build, receiver, kind, caplog, monkeypatch
):
    """Its queue is full after two spans."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "2")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1" if kind == "silent" else "0.2")
    caplog.set_level(logging.WARNING)
    receiver.status = 400
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "127.0.0.1:{1}".format(*silent.getsockname())
        if kind == "closed":
            silent.close()
        url = receiver.endpoint if kind == "refusing" else f"http://{address}/v1/traces"
        with serving(demo_build, otlp_traces_endpoint=url) as server:
            requested = {**DRAWN, "max_tokens": 2}
            with httpx.Client(base_url=server.address, timeout=300) as client:
                began = time.monotonic()
                for _ in range(8):
                    client.post("/v1/completions", json=requested).raise_for_status()
                # One that waited for the endpoint would take a second for each of 32 spans.
                assert time.monotonic() - began < 30
            wait_until(lambda: "does not take spans" in caplog.text)
    messages = [record.getMessage() for record in caplog.records if "spans" in record.getMessage()]
    ours = [text for text in messages if "does not take spans" in text]
    assert len(ours) == 1 and url in ours[0]
    assert set(messages) - set(ours) <= {
        "the last spans are not sent: the endpoint does not answer in time"
    }
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


def test_a_shutdown_waits_for_an_endpoint_within_a_bound(monkeypatch, caplog):
    monkeypatch.setattr(otlp, "FLUSH_SECONDS", 0.2)
    is_ended = threading.Event()

    def export(spans: Any) -> Any:
        assert is_ended.wait(60), "the exporter's wait is not ended"
        return SpanExportResult.FAILURE

    exporter: Any = SimpleNamespace(export=export, shutdown=is_ended.set)
    spans = otlp.Spans(exporter)
    spans.write(RequestRecord(bare_scope()))
    began = time.monotonic()
    spans.close()
    assert time.monotonic() - began < 20, "the SDK's own bound is 30 seconds"
    assert is_ended.is_set() and "the last spans are not sent" in caplog.text


def test_an_endpoint_that_comes_back_is_warned_of_again(receiver, caplog):
    reporting = otlp.Telling(otlp.OTLPSpanExporter(receiver.endpoint), receiver.endpoint)
    caplog.set_level(logging.INFO, "jaxpage")
    for status in (400, 400, 200, 200, 400):
        receiver.status = status
        reporting.export([])
    reporting.shutdown()
    ours = [record for record in caplog.records if record.name == otlp.__name__]
    levels = [record.levelname for record in ours]
    assert levels == ["WARNING", "INFO", "WARNING"]


# ---- the setting


def test_without_the_setting_nothing_of_opentelemetry_is_imported():
    """One module imports it, and one function that module."""
    package = Path(jaxpage.__file__).parent
    sources = {path: path.read_text() for path in package.rglob("*.py")}
    for imported, importer in (("opentelemetry", "otlp"), ("metrics.otlp", "tracing")):
        pattern = re.compile(rf"^ *(from|import) .*{imported}", re.MULTILINE)
        [path_of_match] = [path for path, text in sources.items() if pattern.search(text)]
        assert path_of_match == package / "serving" / "metrics" / f"{importer}.py"
    program = (
        "import sys\n"
        "from jaxpage.serving.settings.server_config import ServerConfig\n"
        "from jaxpage.serving.metrics.tracing import open_tracing\n"
        "names = lambda: [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "assert open_tracing(ServerConfig()) is None and not names(), names()\n"
        "open_tracing(ServerConfig(otlp_traces_endpoint='http://127.0.0.1:9/v1/traces')).close()\n"
        "assert names()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_a_missing_package_is_named_with_the_extra(monkeypatch):
    real = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name == "opentelemetry.sdk.resources":
            raise ModuleNotFoundError(f"No module named {name!r}", name="opentelemetry.sdk")
        return real(name, *arguments, **named)

    monkeypatch.delitem(sys.modules, "jaxpage.serving.metrics.otlp")
    monkeypatch.setattr(builtins, "__import__", without)
    message = "otlp_traces_endpoint: opentelemetry.sdk is missing: pip install 'jaxpage[otel]'"
    with pytest.raises(ConfigError, match=f"^{message.replace('[', '.').replace(']', '.')}$"):
        open_tracing(ServerConfig(otlp_traces_endpoint=ENDPOINT))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "OTEL_EXPORTER_OTLP_PROTOCOL",
            "grpc",
            "OTEL_EXPORTER_OTLP_PROTOCOL=grpc is not supported",
        ),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "3", "max_export_batch_size must be"),
    ],
)
def test_a_variable_that_is_not_supported_is_refused(name, value, message, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        open_tracing(ServerConfig(otlp_traces_endpoint=ENDPOINT))
