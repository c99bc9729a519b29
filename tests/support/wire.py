"""For tests of the wire format: a model's context with the packaged tokenizer, and outputs of an
engine that follow a script.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jaxpage
from jaxpage.chat_forms import ChatFormat
from jaxpage.checkpoints.tokenizers.tokenizer_files import load_tokenizer
from jaxpage.decoding.grammars import matcher_of, problem_of, source_of, tokenizer_of
from jaxpage.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.derived_forms import choose_form, derive_form
from jaxpage.serving.wire.exchange import Exchange, open_chat

VOCAB_SIZE = 2048
MODEL = "demo"
CHATML = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{% if message.role == 'forbidden' %}{{ raise_exception('no') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


@functools.cache
def tokenizer() -> Any:
    return load_tokenizer(Path(jaxpage.__file__).parent / "demo")


def with_template(template: str) -> Any:
    """Returns the tokenizer with another chat template."""
    loaded = load_tokenizer(Path(jaxpage.__file__).parent / "demo")
    loaded.chat_template = template
    return loaded


@functools.cache
def chatml() -> Any:
    return with_template(CHATML)


@functools.cache
def _grammar_tokenizer() -> tuple[Any, int]:
    return tokenizer_of(tokenizer().backend_tokenizer.to_str())


def admits(held: tuple[str, str], text: str) -> bool:
    """Returns whether a model that a grammar holds may write a text, and nothing after it."""
    known, end_id = _grammar_tokenizer()
    matcher = matcher_of(known, source_of(*held))
    assert problem_of(matcher.deep_copy(), end_id) is None
    tokens = known.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def context(**settings: Any) -> ModelContext:
    fields: dict[str, Any] = {
        "model_names": (MODEL, "other-name"),
        "max_model_len": 512,
        "vocab_size": VOCAB_SIZE,
    }
    fields |= {"tokenizer": chatml(), "system_fingerprint": "fp_0"}
    parsers = [settings.pop(name, "none") for name in ("tool_parser", "reasoning_parser")]
    if parsers != ["none", "none"]:
        derived = ChatFormat()
        if "auto" in parsers:
            derived = derive_form(settings.get("tokenizer", fields["tokenizer"])).form
        fields["chat_format"] = choose_form(derived, *parsers)
    return ModelContext(**{**fields, **settings})


def prompt_of(
    messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]], served: ModelContext
) -> str:
    """Returns the prompt of a chat, as the server renders it."""
    body = {"model": MODEL, "messages": list(messages), "tools": tools}
    return str(open_chat(body, served).prompts[0].prompt)


@dataclass
class Scripted:
    """One sequence: texts and tokens that come one behind the other, and how it ends."""

    texts: Sequence[str]
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = self.token_ids or [
            (7 * index) % VOCAB_SIZE for index in range(len(self.texts))
        ]


def logprobs(
    token_ids: Sequence[int], expected: int | None
) -> list[dict[int, Logprob] | None] | None:
    """Makes up log probabilities in the form of the engine's: the token itself, then the likeliest.

    The token is the third likeliest.
    """
    if expected is None:
        return None
    entries: list[dict[int, Logprob] | None] = []
    for token_id in token_ids:
        entry = {token_id: Logprob(-3.0 - token_id / 1000, 3, tokenizer().decode([token_id]))}
        for rank in range(1, expected + 1):
            other = token_id if rank == 3 else (token_id + rank) % VOCAB_SIZE
            entry.setdefault(other, Logprob(-1.0 * rank, rank, tokenizer().decode([other])))
        entries.append(entry)
    return entries


def output(exchange: Exchange, scripts: Sequence[Scripted], *, prompt: int = 0) -> RequestOutput:
    """Returns what the engine would give for a prompt, whole. Texts are the scripts', whatever the
    tokens are.
    """
    prompt, params = exchange.prompts[prompt].prompt, exchange.prompts[prompt].params
    ids = tokenizer()(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
    expected, of_prompt = (
        getattr(params, "logprobs", None),
        getattr(params, "prompt_logprobs", None),
    )
    completions = [
        CompletionOutput(
            index=index,
            text="".join(script.texts),
            token_ids=script.token_ids,
            logprobs=logprobs(script.token_ids, expected),
            finish_reason=script.finish_reason,
            stop_reason=script.stop_reason,
        )
        for index, script in enumerate(scripts)
    ]
    return RequestOutput(
        request_id="request-0",
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=ids,
        outputs=completions,
        finished=True,
        prompt_logprobs=None
        if of_prompt is None
        else [None, *(logprobs(ids[1:], of_prompt) or [])],
        metrics=RequestMetrics(arrival_time=0.0, num_cached_tokens=2),
    )


def deltas(whole: RequestOutput, scripts: Sequence[Scripted]) -> Iterator[RequestOutput]:
    """Yields the same, a text and a token of each sequence at a time.

    Those that ended stay in it, with nothing new.
    """
    for step in range(max(len(script.texts) for script in scripts)):
        completions = []
        for output, script in zip(whole.outputs, scripts, strict=True):
            is_over = step >= len(script.texts) - 1
            new = slice(step, step + 1)
            completions.append(
                replace(
                    output,
                    text="".join(script.texts[new]),
                    token_ids=output.token_ids[new],
                    logprobs=None if output.logprobs is None else output.logprobs[new],
                    finish_reason=script.finish_reason if is_over else None,
                    stop_reason=script.stop_reason if is_over else None,
                )
            )
        finished = all(output.finish_reason for output in completions)
        of_prompt = whole.prompt_logprobs if step == 0 else None
        yield replace(whole, outputs=completions, finished=finished, prompt_logprobs=of_prompt)
