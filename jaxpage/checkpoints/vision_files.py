"""Fits the encoder of pictures to the checkpoint of its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpage.checkpoints.fitting import LoadPlan, fit_stored
from jaxpage.checkpoints.problems import Problems
from jaxpage.checkpoints.safetensors_header import TensorInfo
from jaxpage.models import model_weights


@dataclass(frozen=True)
class VisionFiles:
    """Holds the encoder of pictures in a checkpoint that fits.

    Attributes:
        family: The `VisionFamily`.
        spec: The spec of the encoder.
        plan: The tensors that fill its weights.
    """

    family: Any
    spec: Any
    plan: LoadPlan


def fit_vision(
    family: Any,
    spec: Any,
    empty: LoadPlan,
    stored: Mapping[str, TensorInfo],
    problems: Problems,
    *,
    compare: bool = True,
) -> VisionFiles | None:
    """Returns the encoder; None if the checkpoint has no tensor of it.

    Args:
        family: The `VisionFamily`.
        spec: The spec of the encoder.
        empty: A plan without parameters.
        stored: The tensors of the checkpoint by name; those of other models are passed over.
        problems: The list that errors are added to.
        compare: True to compare the numbers of a tensor that is stored under two names.
    """
    weights = model_weights(family, spec)
    names = {name for weight in weights for name in weight.tensor_names}
    if names.isdisjoint(stored):
        return None
    plan = fit_stored(empty, stored, weights, ("*",), problems, compare=compare)
    return VisionFiles(family, spec, plan)
