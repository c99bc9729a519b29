"""Makes OpenTelemetry's spans of records, and sends them to an OTLP endpoint over HTTP.

The SDK reads the variables OTEL_... itself: sampler, resource, headers, queue, propagators. Its
batch processor sends on a thread of its own, from a queue that drops spans when it is full, so that
no request waits for the endpoint.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

from opentelemetry import propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

from jaxpage import __version__
from jaxpage.serving.metrics.tracing import Phase, RequestRecord

logger = logging.getLogger(__name__)
PROTOCOL = "http/protobuf"
# The first that is set holds.
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
FLUSH_SECONDS = 3.0  # the most time that a shutdown waits for the endpoint


class Spans:
    """Makes the spans of each request when it has ended, with the times of its record."""

    def __init__(self, exporter: SpanExporter) -> None:
        """Makes a writer; its thread starts at once.

        Args:
            exporter: Sends the spans.

        Raises:
            ValueError: A variable OTEL_... has a value that the SDK refuses.
        """
        self._exporter = exporter
        resource = Resource.create()
        # The SDK gives this name where no variable OTEL_... names the service.
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "jaxpage"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jaxpage", __version__)

    def write(self, record: RequestRecord) -> None:
        """Puts the spans of a request into the queue; see `SpanWriter`."""
        headers = {name: record.headers.getlist(name) for name in record.headers}
        span = self._tracer.start_span(
            record.name,
            propagate.extract(headers),
            kind=SpanKind.SERVER,
            start_time=record.nanoseconds(record.began),
        )
        if span.is_recording():
            span.set_attributes(record.attributes())
            if record.is_servers_fault:
                span.set_status(StatusCode.ERROR)
            within = set_span_in_context(span)
            for phase in record.phases():
                self._write_phase(record, phase, within)
        span.end(record.nanoseconds(record.ended))

    def _write_phase(self, record: RequestRecord, phase: Phase, within: Any) -> None:
        index = phase.prompt_index
        child = self._tracer.start_span(
            phase.name,
            within,
            attributes={} if index is None else {"jaxpage.prompt.index": index},
            start_time=record.nanoseconds(phase.began),
        )
        child.end(record.nanoseconds(phase.ended))

    def close(self) -> None:
        """Sends what is in the queue, for at most `FLUSH_SECONDS`; later spans are dropped."""
        # The SDK's own bound is 30 seconds, and is no argument of the provider.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(FLUSH_SECONDS)
        if closing.is_alive():
            logger.warning("the last spans are not sent: the endpoint does not answer in time")
            self._exporter.shutdown()  # ends the exporter's wait for its next attempt


class Telling:
    """An exporter that warns once when an endpoint does not take spans, until it does again."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends spans, and returns whether the endpoint has taken them."""
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            logger.debug("the exporter has failed", exc_info=error)
            result = SpanExportResult.FAILURE
        is_failing = result is not SpanExportResult.SUCCESS
        if is_failing and not self._is_failing:
            logger.warning(
                "otlp_traces_endpoint: %s does not take spans; they are dropped until it does",
                self._endpoint,
            )
        elif self._is_failing and not is_failing:
            logger.info("otlp_traces_endpoint: %s takes spans again", self._endpoint)
        self._is_failing = is_failing
        return result

    def shutdown(self) -> None:
        """Ends the exporter."""
        self._exporter.shutdown()


def open_spans(endpoint: str) -> Spans:
    """Returns a writer of spans to an endpoint.

    Raises:
        ValueError: A variable OTEL_... has a value that is not supported.
    """
    for name in PROTOCOL_VARIABLES:
        requested = os.environ.get(name)
        if requested == PROTOCOL:
            break
        if requested:
            raise ValueError(f"{name}={requested} is not supported: spans are sent by {PROTOCOL}")
    spans = Spans(Telling(OTLPSpanExporter(endpoint), endpoint))
    # The SDK logs each attempt, each full queue and each header that is too long, so that clients
    # and a dead endpoint could fill the log. What it says of its variables it has said by now.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    return spans
