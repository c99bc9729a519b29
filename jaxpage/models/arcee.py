"""Arcee (AFM-4.5B, 2025) is Llama with a feed-forward half without gates, of squared ReLU."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jaxpage.models.llama import Llama
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.mlp import plain_mlp
from jaxpage.models.parts.scope import Scope


class ArceeConfig(DecoderConfig):
    """Reads transformers' `ArceeConfig`."""

    model_type = "arcee"
    defaults = Defaults(
        max_length=4096, epsilon=1e-5, activation="relu2", attention_bias=False, mlp_bias=False
    )


class Arcee(Llama, config=ArceeConfig):
    """Arcee (AFM-4.5B, 2025) is Llama with a feed-forward half without gates, of squared ReLU."""

    @classmethod
    def make_mlp(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the feed-forward half of a layer."""
        return plain_mlp(config, layer / "mlp", "up_proj", "down_proj")
