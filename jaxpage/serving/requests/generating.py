"""Answers requests that generate: submits them to the engine, and streams or waits for the outputs.

A client that leaves ends the requests of its exchange.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from jaxpage.driver import AsyncDriver, AwaitedHandle, Receipts
from jaxpage.engine import PreparedRequest
from jaxpage.errors import DeadlineExceeded, ShuttingDown, UnsupportedError
from jaxpage.outputs import RequestOutput
from jaxpage.serving.http.answer_stream import stream_of
from jaxpage.serving.http.answers import (
    make_ignored_header,
    make_refusal,
    to_api_error,
    whole_answer,
)
from jaxpage.serving.http.api_keys import owner_of
from jaxpage.serving.http.loop_turns import LoopTurns, num_entries, portions
from jaxpage.serving.metrics.metrics import ServerMetrics
from jaxpage.serving.metrics.tracing import record_of
from jaxpage.serving.requests.preparing import Preparing
from jaxpage.serving.wire.chat_completions import ChatAnswer
from jaxpage.serving.wire.encoding import Frame
from jaxpage.serving.wire.errors import RETRY_AFTER, ApiError
from jaxpage.serving.wire.exchange import Exchange

MAX_PROMPT_LOGPROBS = 1_000_000  # the most in one answer, which has some hundred MB then
# So often a stream that is asked to looks how much of its prompt is computed.
PROGRESS_SECONDS = 0.5
_ABORTIONS: dict[type[Exception], str] = {DeadlineExceeded: "deadline", ShuttingDown: "shutdown"}


class Generating:
    """Answers exchanges with what the engine generates."""

    def __init__(self, driver: AsyncDriver, preparing: Preparing, metrics: ServerMetrics) -> None:
        self._driver = driver
        self._preparing = preparing
        self._metrics = metrics
        self._loop_turns = LoopTurns()

    @cached_property
    def _receipts(self) -> Receipts:
        return Receipts(self._driver, self._driver.built)

    async def answer(
        self,
        open_exchange: Callable[[], Awaitable[Exchange]],
        arrived: float,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Reads a request, has the engine generate, and sends the answer.

        Args:
            open_exchange: Reads the request, which may take a while.
            arrived: The time at which the request came in, by `time.monotonic`.
            scope: The request, as ASGI describes it.
            receive: Gives the messages of the client.
            send: Takes the messages of the answer.

        Raises:
            ClientDisconnect: The client has left.
            ApiError: The request cannot be answered, and nothing of the answer was sent.
        """
        await while_connected(receive, self._answer(open_exchange, arrived, scope, receive, send))

    async def _answer(
        self,
        open_exchange: Callable[[], Awaitable[Exchange]],
        arrived: float,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        record = record_of(scope)
        try:
            async with self._driver.in_time(arrived):
                exchange = await open_exchange()
                stream_of(scope).exchange = exchange
                record.opened(exchange)
                submitted = await self._submit(exchange, arrived, owner_of(scope))
                record.submitted(submitted)
        except DeadlineExceeded as error:
            raise self._failure_of(error) from error
        headers = make_ignored_header(exchange.ignored_fields)
        try:
            if exchange.stream:
                await self._stream(exchange, submitted, headers, scope)
            else:
                outputs = await asyncio.gather(*(handle.whole() for handle in submitted))
                if exchange.prompts and exchange.prompts[0].receipt:
                    outputs = [await self._add_receipt(exchange, submitted[0], outputs[0])]
                for index, output in enumerate(outputs):
                    record.add(index, output)
                await self._send_whole(exchange, outputs, headers, scope, receive, send)
        except Exception as error:
            raise self._failure_of(error) from error
        finally:
            # A client that left, or an error in one answer, must not leave the others running.
            for handle in submitted:
                handle.cancel()

    async def _submit(self, exchange: Exchange, arrived: float, owner: str) -> list[AwaitedHandle]:
        if not exchange.prompts:
            return []
        first = exchange.prompts[0]
        kept_as = None if first.request_id is None else (owner, first.request_id)
        try:
            if first.continues:
                aborted = await asyncio.wrap_future(self._driver.find_aborted(kept_as))
                _check_adapter(exchange, aborted)
                exchange.prompts[0] = first._replace(params=aborted.params)
                requests = [aborted]
            else:
                requests = await self._preparing.requests(exchange.prompts)
            if first.receipt:
                await self._preparing.receipt(partial(self._receipts.check, requests))
            _check_prompt_logprobs(requests)
            return await self._driver.submit(
                requests,
                stream=exchange.stream,
                name=exchange.id,
                arrived=arrived,
                kept_as=kept_as,
            )
        except Exception as error:
            raise await make_refusal(error, exchange.refusal) from error

    async def _add_receipt(
        self, exchange: Exchange, handle: AwaitedHandle, output: RequestOutput
    ) -> RequestOutput:
        """Returns the last output of a request with its receipt, which names no tensors.

        Raises:
            ApiError: The weights were replaced while it was computed.
        """
        make = partial(self._receipts.make, handle, exchange.model, names_tensors=False)
        try:
            return replace(output, receipt=await self._preparing.receipt(make))
        except UnsupportedError as error:
            raise ApiError(503, str(error), headers=RETRY_AFTER) from error

    async def _send_whole(
        self,
        exchange: Exchange,
        outputs: list[RequestOutput],
        headers: dict[str, str],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Sends an answer that is no stream."""
        stream = stream_of(scope)
        await stream.stop_clock()
        if stream.is_open:
            # A request that a model be loaded may ask for a stream, and has one part.
            await stream.end(stream.frame(exchange.whole(outputs)))
            return
        answer = await self._preparing.answer(
            lambda: whole_answer(exchange.whole(outputs), headers), sum(map(num_entries, outputs))
        )
        await answer(scope, receive, send)

    async def _stream(
        self,
        exchange: Exchange,
        submitted: list[AwaitedHandle],
        headers: dict[str, str],
        scope: Scope,
    ) -> None:
        """Sends the outputs as events or lines, and an error after the headers likewise.

        The stream ends in the same way after an error.
        """
        record = record_of(scope)
        stream = stream_of(scope)
        stream.is_requested = True
        await stream.begin(headers)
        chat = exchange if isinstance(exchange, ChatAnswer) and exchange.reports_progress else None
        seconds = None if chat is None else PROGRESS_SECONDS
        try:
            async with aclosing(updates_of(submitted, seconds)) as updates:
                async for deltas in updates:
                    if chat is not None:
                        await stream.send(_progress_of(chat, submitted[0], stream.frame))
                    if exchange.prompts[0].receipt and any(delta.finished for _, delta in deltas):
                        ((_, ending),) = deltas
                        deltas = [(0, await self._add_receipt(exchange, submitted[0], ending))]
                    for index, delta in deltas:
                        record.add(index, delta)
                    for number, group in portions(deltas):
                        make_part = partial(_events, exchange, group, stream.frame)
                        # Prompt log probabilities come once and are long: the event loop must not
                        # wait.
                        if any(delta.prompt_logprobs for _, delta in group):
                            part = await self._preparing.answer(make_part, number)
                        else:
                            await self._loop_turns.take(number)
                            part = make_part()
                        await stream.send(part)
            last = b"".join(map(stream.frame, exchange.last_chunks()))
        except Exception as error:
            record.failed(_reason(error))
            await stream.fail(self._failure_of(error))
        else:
            await stream.end(last)

    def _failure_of(self, error: Exception) -> ApiError:
        """Counts a request that did not finish, and returns the error for its client."""
        self._metrics.aborted(_reason(error))
        return to_api_error(error)


def _reason(error: Exception) -> str:
    """Returns the reason under which `/metrics` counts a request that did not finish."""
    return _ABORTIONS.get(type(error), "error")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does the work for a request that was read to its end, and ends it when the client leaves.

    Raises:
        ClientDisconnect: The client has left.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        await working
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def updates_of(
    submitted: list[AwaitedHandle], seconds: float | None = None
) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
    """Yields the new outputs of streamed requests, each with the index of its request.

    Args:
        submitted: The requests.
        seconds: The time after which it yields an empty list if there are no outputs, or None.
    """
    waited = {handle.next_delta(): index for index, handle in enumerate(submitted)}
    while waited:
        done, _ = await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        updates = [(waited.pop(future), future.result()) for future in done]
        yield updates
        for index, delta in updates:
            if not delta.finished:
                waited[submitted[index].next_delta()] = index


def _progress_of(chat: ChatAnswer, handle: AwaitedHandle, frame: Frame) -> bytes:
    """Returns what a stream says of its prompt, if there is something new."""
    num_tokens = len(handle.request.token_ids)
    chunks = chat.progress_chunks(num_tokens, handle.num_computed_tokens, handle.metrics)
    return b"".join(map(frame, chunks))


def _check_adapter(exchange: Exchange, request: PreparedRequest) -> None:
    """Raises ApiError if a request is continued with another adapter than it began with."""
    named = exchange.prompts[0].lora
    if (named and named.lora_name) != (request.lora and request.lora.name):
        raise ApiError(
            400,
            f"model: the request did not begin with {exchange.model!r}, and goes on with the "
            "adapter that it had",
            param="model",
        )


def _check_prompt_logprobs(requests: Sequence[PreparedRequest]) -> None:
    """Raises ValueError if the answer would be too long to be kept in memory and written."""
    number = sum(
        len(request.token_ids) * (1 + num_logprobs) * getattr(request.params, "n", 1)
        for request in requests
        if (num_logprobs := getattr(request.params, "prompt_logprobs", None)) is not None
    )
    if number > MAX_PROMPT_LOGPROBS:
        raise ValueError(
            f"prompt_logprobs: the response would have {number} log probabilities (tokens of "
            "all prompts times 1 + prompt_logprobs "
            f"times n); at most {MAX_PROMPT_LOGPROBS} are allowed"
        )


def _events(exchange: Exchange, deltas: Sequence[tuple[int, RequestOutput]], frame: Frame) -> bytes:
    return b"".join(
        frame(chunk) for index, delta in deltas for chunk in exchange.chunks(index, delta)
    )
