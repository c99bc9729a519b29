"""Notes where the time of a request went and what it used, for the spans of OpenTelemetry.

The outermost middleware notes how a request came and ended. Whoever answers it notes in the same
record what it learns, and `otlp.py` makes spans of the record once the request has ended:

    POST /v1/chat/completions  ├─────────────── chat demo ───────────────┤   the server's span
    load (several models)         ├─ load ─┤                                 its children
    RequestMetrics                           ├ queue ┤├ prefill ┤├ decode ┤

Without the setting there is no middleware, and nothing of OpenTelemetry is imported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxpage.driver import Handle
from jaxpage.errors import ConfigError
from jaxpage.outputs import RequestMetrics, RequestOutput
from jaxpage.serving.dialects.registry import DIALECTS
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.wire.pair_scores import SCORE_PATHS
from jaxpage.serving.wire.prompt_request import PromptRequest
from jaxpage.serving.wire.rerank import RERANK_PATHS

logger = logging.getLogger(__name__)

# The operation of each path, as the semantic conventions for generative AI call it. For scores and
# ranks they have no name.
OPERATIONS = {
    "/v1/embeddings": "embeddings",
    **dict.fromkeys(SCORE_PATHS, "score"),
    **dict.fromkeys(RERANK_PATHS, "rerank"),
    **{path: name for dialect in DIALECTS for path, name in dialect.operations.items()},
}
_PARAMETERS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "n": "gen_ai.request.choice.count",
}


class TracedRequest(Protocol):
    """A request that was understood, such as an `Exchange`."""

    @property
    def model(self) -> str:
        """Returns the name of the model in the request."""
        ...

    @property
    def prompts(self) -> list[PromptRequest]:
        """Returns the prompts, which share one object of parameters."""
        ...


class Phase(NamedTuple):
    """Holds a part of a request's time, by `time.monotonic`.

    Attributes:
        name: The name of its span.
        began: Its beginning.
        ended: Its end.
        prompt_index: The index of the prompt in the request; None for a part of all prompts.
    """

    name: str
    began: float
    ended: float
    prompt_index: int | None = None


class Untraced:
    """Ignores what it is told of a request."""

    def opened(self, requested: TracedRequest) -> None:
        """Notes a request that was understood."""

    def loaded(self, since: float) -> None:
        """Notes that the model of the request is there, for which it has waited since then."""

    def submitted(self, handles: Sequence[Handle]) -> None:
        """Notes what the driver has of the request: a handle for each prompt."""

    def add(self, index: int, output: RequestOutput) -> None:
        """Notes what is new of the prompt of this index, or all of it."""

    def read(self, num_tokens: int) -> None:
        """Notes the tokens of the texts of a request that generates nothing."""

    def failed(self, reason: str) -> None:
        """Notes why a stream ended before its end, by a reason of `ServerMetrics.aborted`."""


UNTRACED = Untraced()


class RequestRecord(Untraced):
    """Holds what the spans of one request are made of, on the event loop.

    Attributes:
        headers: The request's headers, which may name the caller's span.
        began: The time at which the request came, by `time.monotonic`.
        ended: The time at which its answer was out, or its client gone.
        status: The HTTP status of the answer; None while there is none.
        is_whole: True once all of the answer was handed to the connection.
    """

    def __init__(self, scope: Scope) -> None:
        self.headers = Headers(scope=scope)
        self.began = self.ended = time.monotonic()
        self.status: int | None = None
        self.is_whole = False
        self._scope = scope
        self._zero = time.time_ns() - int(self.began * 1e9)
        self._requested: TracedRequest | None = None
        self._phases: list[Phase] = []
        self._handles: Sequence[Handle] = ()
        self._num_drawn: dict[int, int] = {}
        self._reasons: dict[tuple[int, int], str] = {}  # by the indices of prompt and output
        self._finished: set[int] = set()
        self._num_read = 0
        self._failure: str | None = None

    def opened(self, requested: TracedRequest) -> None:
        self._requested = requested

    def loaded(self, since: float) -> None:
        self._phases.append(Phase("load", since, time.monotonic()))

    def submitted(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def add(self, index: int, output: RequestOutput) -> None:
        drawn = sum(len(completion.token_ids) for completion in output.outputs)
        self._num_drawn[index] = self._num_drawn.get(index, 0) + drawn
        for completion in output.outputs:
            if completion.finish_reason is not None:
                self._reasons[index, completion.index] = completion.finish_reason
        if output.finished:
            self._finished.add(index)

    def read(self, num_tokens: int) -> None:
        self._num_read += num_tokens

    def failed(self, reason: str) -> None:
        self._failure = reason

    def nanoseconds(self, moment: float) -> int:
        """Returns a time of `time.monotonic` in nanoseconds since 1970.

        All times of a request have one difference, so that a child lies within its parent also
        when the clock is set meanwhile.
        """
        return self._zero + int(moment * 1e9)

    @property
    def name(self) -> str:
        """Returns the name of the server's span; a client cannot choose it."""
        path = self._scope["path"]
        return (
            f"POST {path}"
            if self._requested is None
            else f"{OPERATIONS[path]} {self._requested.model}"
        )

    @property
    def error(self) -> str | None:
        """Returns the kind of error with which the request ended; None if it was answered."""
        # It goes first, because a stream that fails has sent status 200 before.
        if self._failure is not None:
            return self._failure
        if not self.is_whole:
            return str(self._scope["state"].get("cut_because", "disconnect"))
        return str(self.status) if (self.status or 0) >= 400 else None

    @property
    def is_servers_fault(self) -> bool:
        """Returns whether the error is one of the server, and not of its client."""
        return self._failure is not None or (self.status or 0) >= 500

    def phases(self) -> Iterator[Phase]:
        """Yields the parts of the time, which are those of `/metrics`; see `Latencies`.

        A part in which the request was ended lasts until then.
        """
        yield from self._phases
        for index, metrics in self._metrics():
            moments = (
                metrics.arrival_time,
                metrics.first_scheduled_time,
                metrics.first_token_time,
                metrics.last_token_time,
            )
            names = ("queue", "prefill", "decode")
            for name, began, ended in zip(names, moments, moments[1:], strict=False):
                if began is not None:
                    # The engine may take a step more after its client has left.
                    last = self.ended if ended is None else min(ended, self.ended)
                    yield Phase(name, began, last, index)

    def attributes(self) -> dict[str, Any]:
        """Returns the attributes of the server's span, without any text of prompts and outputs."""
        path = self._scope["path"]
        attributes: dict[str, Any] = {
            "http.request.method": "POST",
            "http.route": path,
            "url.path": path,
            "url.scheme": self._scope.get("scheme", "http"),
            "http.response.status_code": self.status,
            "error.type": self.error,
            "gen_ai.operation.name": OPERATIONS[path],
            "gen_ai.provider.name": "jaxpage",
            "jaxpage.request.id": self._scope["state"].get("request_id"),
        }
        if self._requested is not None:
            attributes |= _of_request(self._requested)
        if self._num_read:
            attributes["gen_ai.usage.input_tokens"] = self._num_read
        if self._handles:
            attributes |= self._of_engine()
        return {name: value for name, value in attributes.items() if value is not None}

    def _of_engine(self) -> dict[str, Any]:
        metrics = [each for _, each in self._metrics()]
        return {
            "gen_ai.response.finish_reasons": self._finish_reasons(),
            "gen_ai.usage.input_tokens": sum(
                len(handle.request.token_ids) for handle in self._handles
            ),
            "gen_ai.usage.output_tokens": sum(map(self._num_output_tokens, self._indices)),
            "gen_ai.usage.cache_read.input_tokens": sum(each.num_cached_tokens for each in metrics),
            "jaxpage.drafts": sum(each.num_drafts for each in metrics),
            "jaxpage.draft_tokens": sum(each.num_draft_tokens for each in metrics),
            "jaxpage.accepted_tokens": sum(each.num_accepted_tokens for each in metrics),
            "jaxpage.preemptions": sum(each.num_preemptions for each in metrics),
        }

    @property
    def _indices(self) -> range:
        return range(len(self._handles))

    def _metrics(self) -> Iterator[tuple[int, RequestMetrics]]:
        for index, handle in enumerate(self._handles):
            if (metrics := handle.metrics) is not None:
                yield index, metrics

    def _num_output_tokens(self, index: int) -> int:
        """Returns the tokens of a prompt's outputs: as in the usage, or of one that was ended all.

        A stream that nobody reads any more has tokens that were not sent.
        """
        if index in self._finished:
            return self._num_drawn[index]
        return self._handles[index].num_output_tokens

    def _finish_reasons(self) -> list[str]:
        """Returns the reason for each output in order; "abort" for one that has not ended."""
        all_reasons = []
        for index, handle in enumerate(self._handles):
            num_outputs = getattr(handle.request.params, "n", None) or 1
            reasons = [self._reasons.get((index, output)) for output in range(num_outputs)]
            all_reasons += [reason or "abort" for reason in reasons]
        return all_reasons


class SpanWriter(Protocol):
    """Makes spans of records, and sends them."""

    def write(self, record: RequestRecord) -> None:
        """Makes the spans of a request that has ended; must not wait."""
        ...

    def close(self) -> None:
        """Sends the last spans, within a bound."""
        ...


class Traced:
    """The middleware that keeps a record of each request for a model.

    It is outside of the envelope, so that it sees every answer as its client does.
    """

    def __init__(self, app: ASGIApp, spans: SpanWriter) -> None:
        self._app = app
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Has a request answered, and writes its spans at its end."""
        if scope.get("method") != "POST" or scope["path"] not in OPERATIONS:
            await self._app(scope, receive, send)
            return
        record = scope.setdefault("state", {})["record"] = RequestRecord(scope)

        async def noting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                record.is_whole = True

        try:
            await self._app(scope, receive, noting_send)
        except Exception:
            record.failed("error")
            raise
        finally:
            record.ended = time.monotonic()
            try:
                self._spans.write(record)
            except Exception:
                logger.exception("the spans of a request cannot be written")


def record_of(scope: Scope) -> Untraced:
    """Returns the record of a request, or one that ignores what it is told."""
    record: Untraced = scope.get("state", {}).get("record", UNTRACED)
    return record


def open_tracing(config: ServerConfig) -> SpanWriter | None:
    """Returns the writer of spans; None without `otlp_traces_endpoint`.

    Raises:
        ConfigError: A package is missing, or a variable OTEL_... has a value that is not supported.
    """
    if config.otlp_traces_endpoint is None:
        return None
    try:
        from jaxpage.serving.metrics.otlp import open_spans

        return open_spans(config.otlp_traces_endpoint)
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint: {error.name} is missing: pip install 'jaxpage[otel]'"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"otlp_traces_endpoint: OpenTelemetry refuses its settings: {error}"
        ) from None


def _of_request(requested: TracedRequest) -> dict[str, Any]:
    params = requested.prompts[0].params if requested.prompts else None
    return {
        "gen_ai.request.model": requested.model,
        "gen_ai.response.model": requested.model,
        "gen_ai.response.id": getattr(requested, "id", None),
        "gen_ai.request.stream": getattr(requested, "stream", None),
        **{name: getattr(params, field, None) for field, name in _PARAMETERS.items()},
    }
