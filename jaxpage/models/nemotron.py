"""Nemotron 3 and 4 (NVIDIA, 2024) and Jais 2 (2025) have LayerNorm and squared ReLU."""

from __future__ import annotations

import functools
from typing import Any

from flax import nnx

from jaxpage.models.llama import Llama
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.mlp import plain_mlp
from jaxpage.models.parts.norms import layer_norm
from jaxpage.models.parts.scope import Scope


class NemotronConfig(DecoderConfig):
    """Reads transformers' `NemotronConfig`."""

    model_type = "nemotron"
    defaults = Defaults(
        max_length=4096,
        partial=0.5,
        epsilon=("norm_eps", 1e-5),
        activation="relu2",
        attention_bias=False,
        mlp_bias=False,
    )


class Nemotron(Llama, config=NemotronConfig):
    """Nemotron 3 and 4, dense, and Minitron (NVIDIA, 2024), have LayerNorm and squared ReLU.

    The scales of norms are stored less 1, and half of each head is rotated.
    """

    make_norm = staticmethod(functools.partial(layer_norm, offset=1.0))

    @classmethod
    def make_mlp(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the feed-forward half of a layer."""
        return plain_mlp(config, layer / "mlp", "up_proj", "down_proj")


class Jais2Config(DecoderConfig):
    """Reads transformers' `Jais2Config`."""

    model_type = "jais2"
    defaults = Defaults(
        max_length=8192,
        epsilon=("layer_norm_eps", 1e-5),
        activation="relu2",
        attention_bias=True,
        mlp_bias=True,
    )


class Jais2(Nemotron, config=Jais2Config):
    """Jais 2 (MBZUAI, Inception, Cerebras, 2025) has LayerNorm, squared ReLU and biases."""

    make_norm = staticmethod(layer_norm)
