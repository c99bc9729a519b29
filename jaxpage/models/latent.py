"""Has the names of `parts.latent` for families that are no pages yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from jax.typing import DTypeLike

from jaxpage.layers.latent_attention import LatentAttention
from jaxpage.models.parts.latent import LatentSpec, latent_attention, read_latent, read_widths
from jaxpage.models.parts.scope import Scope

__all__ = ["LatentSpec", "make_latent_attention", "read_latent", "read_widths"]


def make_latent_attention(
    spec: LatentSpec,
    layer_index: int,
    *,
    width: int,
    num_heads: int,
    rope: Any,
    temperature_tuning: Any,
    name: str,
    dtype: DTypeLike,
) -> LatentAttention:
    """Returns what `latent_attention` does."""
    config: Any = SimpleNamespace(
        hidden_size=width, num_query_heads=num_heads, rope_of=lambda _: rope
    )
    at = Scope(name, dtype)
    return latent_attention(config, spec, layer_index, at, temperature_tuning=temperature_tuning)
