"""Encodes and checks a prompt before a driver gets it, on the thread of the caller."""

from __future__ import annotations

from typing import Any

from jaxpage.engine.admission import CheckedParams, PreparedRequest
from jaxpage.engine.engine import Engine
from jaxpage.engine.prompts import Prompt
from jaxpage.errors import UnsupportedError
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams


def prepared(
    engine: Engine, prompt: Prompt, checked: CheckedParams, *, add_special_tokens: bool = True
) -> PreparedRequest:
    """Encodes and checks a prompt; a grammar is left to `Engine.compiled`.

    Any thread may call this while the engine runs.

    Raises:
        TypeError, ValueError: The prompt is refused, or the tokenizer gives up on it.
    """
    token_ids = prompt.token_ids
    if token_ids is None:
        if engine.tokenizer is None:
            raise ValueError("The model has no tokenizer; give prompts as token ids")
        token_ids = _encoded(engine.tokenizer, prompt.text, add_special_tokens=add_special_tokens)
    return engine.prepare(prompt.text, token_ids, checked)


def _encoded(tokenizer: Any, text: str | None, *, add_special_tokens: bool) -> tuple[int, ...]:
    try:
        return tuple(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    except BaseException as panic:
        # A regular expression of tokenizer.json that gives up raises what is no Exception, from
        # Rust.
        if isinstance(panic, Exception) or type(panic).__name__ != "PanicException":
            raise
        raise ValueError("prompt: the model's tokenizer gives up on this text") from None


def check_streamable(params: SamplingParams | BeamSearchParams) -> None:
    """Raises UnsupportedError where nothing can be shown before the end."""
    if isinstance(params, BeamSearchParams):
        raise UnsupportedError(
            f"streaming cannot show beam_width={params.beam_width}: "
            "which hypotheses are the best is known only at the end"
        )
    if params.ranks:
        raise UnsupportedError(
            f"streaming cannot show best_of={params.best_of}: which are the best n={params.n} is known only at the end"
        )
