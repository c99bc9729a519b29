"""Encodes and checks a prompt before a driver gets it, on the thread of the caller."""

from __future__ import annotations

from typing import Any

from jaxpage.engine import CheckedParams, Engine, PreparedRequest, Prompt
from jaxpage.errors import UnsupportedError
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams


def prepare(
    engine: Engine, prompt: Prompt, checked: CheckedParams, *, add_special_tokens: bool = True
) -> PreparedRequest:
    """Encodes and checks a prompt; a grammar is left to `Engine.compile_grammar`.

    Any thread may call this while the engine runs.

    Args:
        engine: The engine.
        prompt: The prompt.
        checked: The checked parameters.
        add_special_tokens: True if the tokenizer adds its special tokens to a text.

    Raises:
        TypeError: A token id is no integer.
        ValueError: The prompt is refused, or the tokenizer fails on it.
    """
    token_ids = prompt.token_ids
    if token_ids is None:
        if engine.tokenizer is None:
            raise ValueError("The model has no tokenizer; give prompts as token ids")
        token_ids = _encode(engine.tokenizer, prompt.text, add_special_tokens=add_special_tokens)
    return engine.prepare(prompt.text, token_ids, checked)


def _encode(tokenizer: Any, text: str | None, *, add_special_tokens: bool) -> tuple[int, ...]:
    try:
        return tuple(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    except BaseException as panic:
        # If a regular expression of tokenizer.json fails, Rust raises an error that is no
        # Exception.
        if isinstance(panic, Exception) or type(panic).__name__ != "PanicException":
            raise
        raise ValueError("prompt: the model's tokenizer gives up on this text") from None


def check_streamable(params: SamplingParams | BeamSearchParams) -> None:
    """Checks that outputs can be shown before the end.

    Raises:
        UnsupportedError: The parameters choose the best outputs, which are known only at the end.
    """
    if isinstance(params, BeamSearchParams):
        raise UnsupportedError(
            f"streaming cannot show beam_width={params.beam_width}: "
            "which hypotheses are the best is known only at the end"
        )
    if params.ranks:
        raise UnsupportedError(
            f"streaming cannot show best_of={params.best_of}: which are the best n={params.n} is known only at the end"
        )
