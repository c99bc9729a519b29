"""StarCoder2 (Lozhkov et al., 2024) has LayerNorm, biases, and a feed-forward half without gates.

Its window is that of all layers.
"""

from __future__ import annotations

from typing import Any

from flax import nnx

from jaxpage.models.config.fields import Fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts.decoder_config import DecoderConfig, key_value_heads, read_common
from jaxpage.models.parts.mlp import plain_mlp
from jaxpage.models.parts.norms import Norm, layer_norm
from jaxpage.models.parts.scope import Scope


class Starcoder2Config(DecoderConfig):
    """Reads transformers' `Starcoder2Config`. Dropouts are for training."""

    model_type = "starcoder2"

    @classmethod
    def read(cls, fields: Fields) -> Starcoder2Config:
        """Returns what the fields say."""
        window = fields.optional_integer("sliding_window", None)
        bias = fields.flag("use_bias", True)
        return cls(
            **read_common(
                fields,
                num_kv_heads=key_value_heads(fields, 2),
                max_position_embeddings=fields.integer("max_position_embeddings", 4096),
                sliding_windows=(window,) * fields.integer("num_hidden_layers"),
                epsilon=("norm_epsilon", 1e-5),
                activation=("hidden_act", "gelu_pytorch_tanh"),
                tied=True,
            ),
            attention_bias=bias,
            mlp_bias=bias,
        )


class Starcoder2(Llama, config=Starcoder2Config):
    """StarCoder2 (Lozhkov et al., 2024) has LayerNorm, biases, and an MLP without gates.

    Its window is that of all layers.
    """

    @classmethod
    def make_norm(cls, config: Any, at: Scope) -> Norm:
        """Returns a norm of hidden states."""
        return layer_norm(config, at)

    @classmethod
    def make_mlp(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the feed-forward half of a layer."""
        return plain_mlp(config, layer / "mlp", "c_fc", "c_proj")
