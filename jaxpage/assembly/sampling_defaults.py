"""Reads a model's generation_config.json: the sampling parameters of requests that have none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxpage.checkpoints import read_generation_config
from jaxpage.errors import CheckpointError
from jaxpage.settings.field_table import PARAMETERS
from jaxpage.settings.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# These settings change the text in transformers, but cannot be defaults here. With one of the
# neutral values they change nothing.
_LEFT_OUT = (
    "num_beams",
    "no_repeat_ngram_size",
    "typical_p",
    "bad_words_ids",
    "suppress_tokens",
    "sequence_bias",
)
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 1, [], {})

# The defaults of a chat if generation_config.json has none. Text drawn from the whole vocabulary at
# temperature 1 reads badly.
CHAT = {"temperature": 0.7, "top_p": 0.9}


# Numbers that transformers takes and a request cannot have: a test of what may stay, and the value
# that replaces the others.
_OUT_OF_RANGE: tuple[tuple[str, Callable[[float], bool], float], ...] = (
    ("temperature", lambda value: value <= 2.0, 2.0),
    ("top_p", lambda value: value != 0.0, 1e-6),  # only the most likely token
)


def chat_defaults(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sampling parameters of a chat that the model's files do not set.

    Args:
        stated: The parameters that they set; see `read_sampling_defaults`.
    """
    return (
        {}
        if stated.get("temperature") == 0
        else {name: CHAT[name] for name in CHAT if name not in stated}
    )


def read_sampling_defaults(directory: Path) -> dict[str, Any]:
    """Returns fields of `SamplingParams`, and warns about values that are ignored or changed.

    Raises:
        CheckpointError: A value is not valid.
    """
    requested = read_generation_config(directory)
    do_sample = requested.get("do_sample")
    if do_sample not in (None, True, False):
        raise CheckpointError(
            f"{directory}: generation_config.json: do_sample must be true or false, not "
            f"{do_sample!r}"
        )
    if left_out := [
        f"{name}={requested[name]!r:.80}"
        for name in _LEFT_OUT
        if requested.get(name) not in _NEUTRAL
    ]:
        logger.warning("generation_config.json asks for %s, which is left out", ", ".join(left_out))
    fields = {field.name: field for field in PARAMETERS if field.config}
    values = {name: requested[name] for name in fields if requested.get(name) is not None}
    for name, is_kept, meant in _OUT_OF_RANGE:
        if _is_number(values.get(name)) and not is_kept(values[name]):
            logger.warning(
                "generation_config.json: %s = %r is taken as %s", name, values[name], meant
            )
            values[name] = meant
    if do_sample is False:
        values = {"temperature": 0.0} | {
            name: values[name] for name in values if not fields[name].of_draws
        }
    try:
        SamplingParams(**values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{directory}: generation_config.json: {error}") from error
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
