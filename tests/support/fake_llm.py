"""An engine for tests of the command line: it answers at once, and remembers what it was asked."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

from jaxpage.outputs import CompletionOutput, RequestOutput
from jaxpage.settings.sampling_params import SamplingParams


class FakeLLM:
    """Answers with fixed chunks. A conversation has as many tokens as words."""

    calls: ClassVar[list[tuple[Any, SamplingParams]]] = []
    settings: ClassVar[dict[str, Any]] = {}
    fails: ClassVar[Exception | None] = None
    closed: ClassVar[bool] = False
    sampling_defaults: ClassVar[dict[str, Any]] = {"top_k": 40}
    memory: ClassVar[Any] = SimpleNamespace(max_model_len=10_000)
    max_model_len: ClassVar[int] = 10_000

    def __init__(self, **settings: Any) -> None:
        if FakeLLM.fails is not None:
            raise FakeLLM.fails
        FakeLLM.settings = settings

    @classmethod
    def forget(cls) -> None:
        cls.calls, cls.settings, cls.fails, cls.closed = [], {}, None, False

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        FakeLLM.closed = True

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        return SamplingParams(**{**self.sampling_defaults, **overrides})

    def chat_prompt(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        text = " | ".join(message["content"] for message in messages)
        return {"prompt": text, "prompt_token_ids": text.split()}

    def stream(
        self, prompt: Any, params: SamplingParams, *, receipt: bool = False
    ) -> Iterator[RequestOutput]:
        if prompt == "":
            raise ValueError("The prompt has no tokens; at least one is needed")
        FakeLLM.calls.append((prompt, params))
        return self._chunks()

    def _chunks(self) -> Iterator[RequestOutput]:
        for index, text in enumerate(("Hello", " wörld")):
            completion = CompletionOutput(
                index=0, text=text, token_ids=[index], finish_reason="stop" if index else None
            )
            yield RequestOutput(
                request_id="0",
                prompt=None,
                prompt_token_ids=[1],
                outputs=[completion],
                finished=bool(index),
            )

    def stats(self) -> dict[str, Any]:
        return {"compile_total": 7, "compile_seconds_total": 1.5}
