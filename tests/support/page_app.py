"""A small server for the page: the routes of the inspector and as much of OpenAI's wire format as the playground asks for, over an LLM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxpage import LLM, BeamSearchParams, SamplingParams
from jaxpage.engine.engine import Engine
from jaxpage.outputs import CompletionOutput
from jaxpage.serving.inspector.routes import page_routes, state_routes

KEY = "correct horse"


class LockedEngine:
    """The engine of an LLM, between two steps of whoever steps it."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    async def snapshot(self, function: Callable[[Engine], Any], /) -> Any:
        def locked() -> Any:
            with self._llm._calls._lock:
                return function(self._llm._engine)

        return await asyncio.to_thread(locked)


def make_app(llm: LLM | None, *, key: str | None = None) -> Starlette:
    """llm: None serves the page alone. key: asked for on every route but the page's files."""
    routes = page_routes()
    if llm is not None:
        routes += state_routes(LockedEngine(llm), SimpleNamespace(ui_show_prompts=False))
        routes += [
            Route("/v1/models", lambda request: JSONResponse({"data": [{"id": "demo"}]})),
            Route("/v1/completions", _completions(llm), methods=["POST"]),
            Route("/v1/chat/completions", _completions(llm), methods=["POST"]),
        ]

    async def gate(request: Request, proceed: Any) -> Response:
        if not request.url.path.startswith("/ui") and request.headers.get("authorization") != f"Bearer {key}":
            return JSONResponse({"error": {"message": "no key", "type": "authentication_error", "param": None}}, 401)
        return await proceed(request)

    return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, gate)] if key else [])


def _completions(llm: LLM) -> Callable[[Request], Any]:
    async def complete(request: Request) -> Response:
        body = await request.json()
        chat = "messages" in body
        prompt = llm.chat_prompt(body["messages"]) if chat else body["prompt"]
        if body.get("use_beam_search"):
            params: Any = BeamSearchParams(body["n"], max_tokens=body["max_tokens"])
            output = await asyncio.to_thread(lambda: llm.generate(prompt, params, use_tqdm=False)[0])
            return JSONResponse(
                {"choices": [_choice(one, chat, whole=True) for one in output.outputs], "usage": _usage(output)}
            )
        try:
            params = SamplingParams(
                n=body.get("n", 1),
                temperature=body["temperature"],
                top_p=body["top_p"],
                top_k=body.get("top_k", 0),
                seed=body.get("seed"),
                stop=body.get("stop"),
                max_tokens=body["max_tokens"],
                logprobs=body.get("top_logprobs" if chat else "logprobs"),
            )
        except ValueError as error:
            return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error", "param": None}}, 400)
        return StreamingResponse(_stream(llm, prompt, params, chat), media_type="text/event-stream")

    return complete


async def _stream(llm: LLM, prompt: Any, params: SamplingParams, chat: bool) -> Any:
    chunks = llm.stream(prompt, params)
    num_tokens = 0
    try:
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            num_tokens += sum(len(one.token_ids) for one in chunk.outputs)
            for one in chunk.outputs:
                yield _frame({"id": "cmpl-1", "choices": [_choice(one, chat)]})
        yield _frame({"id": "cmpl-1", "choices": [], "usage": {"completion_tokens": num_tokens}})
        yield b"data: [DONE]\n\n"
    finally:
        chunks.close()


def _frame(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _usage(output: Any) -> dict[str, int]:
    return {"completion_tokens": sum(len(one.token_ids) for one in output.outputs)}


def _choice(one: CompletionOutput, chat: bool, *, whole: bool = False) -> dict[str, Any]:
    entries = [list(entry.values()) for entry in one.logprobs or [] if entry]
    logprobs: Any = None
    if entries and chat:
        tokens = [[{"token": top.decoded_token, "logprob": top.logprob} for top in entry] for entry in entries]
        logprobs = {"content": [{**first, "top_logprobs": [first, *rest]} for first, *rest in tokens]}
    elif entries:
        logprobs = {
            "tokens": [entry[0].decoded_token for entry in entries],
            "token_logprobs": [entry[0].logprob for entry in entries],
            "top_logprobs": [{top.decoded_token: top.logprob for top in entry} for entry in entries],
        }
    said = {"text": one.text} if not chat else {"message" if whole else "delta": {"content": one.text}}
    return {"index": one.index, **said, "logprobs": logprobs, "finish_reason": one.finish_reason}


@contextlib.contextmanager
def served(app: Starlette) -> Iterator[str]:
    """Runs an app on a free port of this machine; gives its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
    started = threading.Event()
    startup = server.startup

    async def tell(*arguments: Any, **more: Any) -> None:
        await startup(*arguments, **more)
        started.set()

    server.startup = tell  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
