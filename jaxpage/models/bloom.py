"""BLOOM and BLOOMZ (BigScience, 2022) have ALiBi in place of positions, and LayerNorm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.models.alibi import alibi_sizes
from jaxpage.models.block_form import BlockForm
from jaxpage.models.config_fields import RefusedField
from jaxpage.models.falcon import NAMES
from jaxpage.models.fields import Fields
from jaxpage.models.rotary_decoder import RotaryDecoder, RotaryDecoderSpec

__all__ = ["Model", "Spec", "ignored", "prefix"]

prefix = "transformer."
ignored: tuple[str, ...] = ()
ALIASES = {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}


class Spec(RotaryDecoderSpec):
    """Reads transformers' `BloomConfig`.

    `pretraining_tp` and `slow_but_exact` are about the order of sums.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "bloom", {**ALIASES, "hidden_size": "n_embed"}) as fields:
            if fields.flag("apply_residual_connection_post_layernorm", False):
                text = "apply_residual_connection_post_layernorm = true is not supported"
                error = RefusedField(text)
                fields.note(error, apply_residual_connection_post_layernorm=False)
            return cls._from_fields(
                fields,
                **alibi_sizes(fields, fields.integer("seq_length", 2048)),
                attention_bias=True,
                mlp_bias=True,
                plain_mlp=("dense_h_to_4h", "dense_4h_to_h"),
                epsilon=("layer_norm_epsilon", 1e-5),
                activation="gelu_new",
                form=BlockForm(kind="layer"),
                name="transformer",
                names=NAMES,
                tied=True,
            )


class Model(RotaryDecoder):
    """Computes a BLOOM model, which has a norm after the token table; see `models.base.Model`."""

    def __init__(self, spec: RotaryDecoderSpec, *, dtype: DTypeLike):
        super().__init__(spec, dtype=dtype)
        self.tokens_norm = spec.form.norm(
            spec.hidden_size,
            name=f"{spec.name}.word_embeddings_layernorm",
            epsilon=spec.norm_epsilon,
            dtype=dtype,
        )

    def embed(
        self, token_ids_T: Int[Array, "T"], positions_T: Int[Array, "T"]
    ) -> Float[Array, "T D"]:
        """Returns the input of the first layer."""
        return self.tokens_norm(super().embed(token_ids_T, positions_T))
