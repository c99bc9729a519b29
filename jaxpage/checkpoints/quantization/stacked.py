"""Refuses quantised experts that are one tensor of a layer, in formats that cannot be read so.

Only MXFP4 and the formats that round at load can.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxpage.checkpoints.quantization import mxfp4
from jaxpage.checkpoints.quantization.formats import EXCLUDED, METHODS
from jaxpage.checkpoints.quantization.scheme import UNQUANTISED, Scheme
from jaxpage.models.parameters import Weight

_SEPARATE = re.compile(r"\.experts\.\d")
_UNQUANTIZED = re.compile(r"\.experts\.[a-z_]+_proj$")


def explain_refused_experts(
    scheme: Scheme, weights: Sequence[Weight], unexpected: Sequence[str]
) -> str | None:
    """Returns one sentence in place of a list of all experts' tensors, or None.

    Args:
        scheme: The scheme of the checkpoint.
        weights: The weights of the model.
        unexpected: The names of the checkpoint's tensors that fill no parameter.
    """
    if scheme.name not in METHODS or scheme.name == mxfp4.NAME:
        return None
    names = (piece.name for weight in weights for piece in weight.sources[0].pieces)
    separate = next(filter(_SEPARATE.search, names), None)
    others = [
        name
        for name in unexpected
        if ".experts." in name and not (separate and _SEPARATE.search(name))
    ]
    if not others:
        return None
    advice = "use the checkpoint in MXFP4"
    if separate and all(map(_UNQUANTIZED.search, others)):
        advice = (
            "if they are not quantised, add 're:.*[.]experts' to "
            f"quantization_config.{EXCLUDED[scheme.name]} of config.json"
        )
    elif separate:
        advice = f"use a checkpoint that has tensors for each expert, such as {separate!r}"
    return (
        f"experts quantised by {scheme.name!r} are not loaded from {others[0]!a} and "
        f"{len(others) - 1} other tensors; {advice}, "
        f"or use {UNQUANTISED}"
    )
