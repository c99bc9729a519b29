"""StarCoder2 (Lozhkov et al., 2024) has LayerNorm, biases, and a feed-forward half without gates.

Its window is that of all layers.
"""

from __future__ import annotations

from typing import Any

from flax import nnx

from jaxpage.models.config.fields import Fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.mlp import plain_mlp
from jaxpage.models.parts.norms import layer_norm
from jaxpage.models.parts.scope import Scope


class Starcoder2Config(DecoderConfig):
    """Reads transformers' `Starcoder2Config`. Dropouts are for training."""

    model_type = "starcoder2"
    defaults = Defaults(
        num_kv_heads=2,
        max_length=4096,
        epsilon=("norm_epsilon", 1e-5),
        activation="gelu_pytorch_tanh",
        tied=True,
    )

    @classmethod
    def read(cls, fields: Fields) -> Starcoder2Config:
        """Returns what the fields say."""
        window = fields.optional_integer("sliding_window", None)
        bias = fields.flag("use_bias", True)
        return cls.from_fields(
            fields,
            sliding_windows=window,
            attention_bias=bias,
            mlp_bias=bias,
        )


class Starcoder2(Llama, config=Starcoder2Config):
    """StarCoder2 (Lozhkov et al., 2024) has LayerNorm, biases, and an MLP without gates.

    Its window is that of all layers.
    """

    make_norm = staticmethod(layer_norm)

    @classmethod
    def make_mlp(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the feed-forward half of a layer."""
        return plain_mlp(config, layer / "mlp", "c_fc", "c_proj")
