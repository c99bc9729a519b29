"""Makes the norms of a decoder."""

from __future__ import annotations

from typing import Any

from jaxpage.layers import LayerNorm, RMSNorm
from jaxpage.models.parts.names import Scope
from jaxpage.models.parts.text_config import LayerSizes

Norm = RMSNorm | LayerNorm


def rms_norm(
    config: LayerSizes,
    at: Scope | None,
    *,
    width: int | None = None,
    axis: str | None = "embed",
    offset: float = 0.0,
) -> RMSNorm:
    """Returns an RMS norm.

    Args:
        config: The config of the model.
        at: The scope of the norm; None if it has no scale.
        width: The width of what it normalises; None for that of the model.
        axis: The axis of its scale.
        offset: The number that is added to the stored scale.
    """
    return RMSNorm(
        width or config.hidden_size,
        name=None if at is None else at.name,
        epsilon=config.norm_epsilon,
        axis=axis if at is None else at.axis(axis),
        offset=offset,
        dtype="float32" if at is None else at.dtype,
    )


def unscaled_rms_norm(config: LayerSizes, at: Scope, **options: Any) -> RMSNorm:
    """Returns an RMS norm without a scale, so that no checkpoint has it; see `rms_norm`."""
    return rms_norm(config, None, **options)


def layer_norm(
    config: LayerSizes,
    at: Scope,
    *,
    width: int | None = None,
    axis: str | None = "embed",
    affine: bool = True,
    bias: bool = True,
    offset: float = 0.0,
) -> LayerNorm:
    """Returns a LayerNorm, with a scale and a bias unless one of them is left out.

    Args:
        config: The config of the model.
        at: The scope of the norm.
        width: The width of what it normalises; None for that of the model.
        axis: The axis of its scale and its bias.
        affine: False if it has neither.
        bias: False if it has no bias.
        offset: The number that is added to the stored scale.
    """
    return LayerNorm(
        width or config.hidden_size,
        name=at.name,
        epsilon=config.norm_epsilon,
        axis=at.axis(axis),
        affine=affine,
        bias=affine and bias,
        offset=offset,
        dtype=at.dtype,
    )
