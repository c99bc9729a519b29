"""XGLM (Lin et al., 2021) has sinusoids for positions, and LayerNorm before both halves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpage.layers.rope import NO_ROTATION
from jaxpage.models.block_form import BlockForm
from jaxpage.models.decoder_names import DecoderNames
from jaxpage.models.fields import Fields
from jaxpage.models.mlp import MLPNames
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

ignored = ("*.embed_positions.weights",)
ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "attention_heads",
    "num_hidden_layers": "num_layers",
}
NAMES = DecoderNames(norm="layer_norm", output="out_proj")
MLP_NAMES = MLPNames("")  # The products are in the layer itself.
FORM = BlockForm(norms=("self_attn_layer_norm", None, "final_layer_norm", None), kind="layer")
POSITION_OFFSET = 2  # The first positions are for padding, in the code that XGLM was trained with.


class Spec(RotaryDecoderSpec):
    """Reads transformers' `XGLMConfig`. Dropouts are for training."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "xglm", ALIASES) as fields:
            width = fields.integer("hidden_size")
            longest = fields.integer("max_position_embeddings", 2048)
            return cls._from_fields(
                fields,
                num_kv_heads=fields.integer("num_attention_heads"),
                head_dim=fields.divide("hidden_size", "num_attention_heads"),
                max_position_embeddings=longest,
                feed_forward_width=fields.integer("ffn_dim"),
                rope=(NO_ROTATION, longest),
                attention_bias=True,
                mlp_bias=True,
                plain_mlp=("fc1", "fc2"),
                epsilon=1e-5,
                activation=("activation_function", "gelu"),
                embedding_scale=width**0.5 if fields.flag("scale_embedding", True) else 1.0,
                form=FORM,
                names=NAMES,
                mlp_names=MLP_NAMES,
                tied=True,
            )


class Model(RotaryDecoder):
    """Computes an XGLM model; see `models.base.Model`."""

    def embed(
        self, token_ids_T: Int[Array, "T"], positions_T: Int[Array, "T"]
    ) -> Float[Array, "T D"]:
        """Returns the input of the first layer."""
        hidden_TD = super().embed(token_ids_T, positions_T)
        half = hidden_TD.shape[1] // 2
        frequencies = np.exp(np.arange(half, dtype=np.float32) * -(np.log(10_000.0) / (half - 1)))
        moved_T = (positions_T + POSITION_OFFSET).astype(jnp.float32)
        angles_TE = moved_T[:, None] * jnp.asarray(frequencies, jnp.float32)[None, :]
        sinusoids_TD = jnp.concatenate([jnp.sin(angles_TE), jnp.cos(angles_TE)], axis=1)
        odd = hidden_TD.shape[1] - 2 * half
        return hidden_TD + jnp.pad(sinusoids_TD, ((0, 0), (0, odd))).astype(hidden_TD.dtype)
