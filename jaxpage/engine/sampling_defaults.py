"""What a model's generation_config.json says of sampling: the defaults of requests that bring no parameters."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from jaxpage.checkpoints import read_generation_config
from jaxpage.errors import CheckpointError
from jaxpage.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_NAMES = ("temperature", "top_p", "top_k", "min_p")


def read_sampling_defaults(directory: Path) -> dict[str, Any]:
    """Fields of `SamplingParams`. Raises CheckpointError when a value makes no sense; warns of what is not honoured."""
    asked = read_generation_config(directory)
    do_sample = asked.get("do_sample")
    if do_sample not in (None, True, False):
        raise CheckpointError(
            f"{directory}: generation_config.json: do_sample must be true or false, not {do_sample!r}"
        )
    if asked.get("repetition_penalty") not in (None, 1):
        logger.warning(
            "generation_config.json asks for repetition_penalty=%s, which this version does not support; it is left out",
            asked["repetition_penalty"],
        )
    values = {name: asked[name] for name in _NAMES if asked.get(name) is not None}
    if do_sample is False:
        values = {"temperature": 0.0}
    try:
        SamplingParams(**values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{directory}: generation_config.json: {error}") from error
    return values
