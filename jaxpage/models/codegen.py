"""CodeGen (Salesforce, 2022) is GPT-J with queries, values and keys from one product, in parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpage.layers.attention import Attention, Projections
from jaxpage.models import gptj
from jaxpage.models.config_fields import WrongField
from jaxpage.models.gptj import ignored, prefix
from jaxpage.models.rotary_decoder import DecoderLayer, RotaryDecoder, RotaryDecoderSpec

__all__ = ["Model", "Spec", "ignored", "prefix"]

NUM_PARTS = 4  # The number of devices among which the models were divided in training.
NAMES = replace(gptj.NAMES, fused="qkv_proj")


class Spec(gptj.Spec):
    """Reads transformers' `CodeGenConfig`. `n_ctx` has no effect there either."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        spec = cls._read(config, "codegen", NAMES)
        if spec.num_query_heads % NUM_PARTS:
            raise WrongField(f"{NUM_PARTS} must divide n_head = {spec.num_query_heads}")
        return spec


class AttentionInParts(Attention):
    """Divides the one product in parts, each with the queries, values and keys of some heads."""

    def project(self, x_TI: Float[Array, "T I"]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, keys and values; see `Attention.project`."""
        fused = self.query_key_value(x_TI)
        num_tokens = fused.shape[0]
        parts = fused.reshape(num_tokens, self.num_groups, 3, -1)
        q, v, k = (parts[:, :, place].reshape(num_tokens, -1) for place in range(3))
        return q, k, v


class Model(RotaryDecoder):
    """Computes a CodeGen model; see `models.base.Model`."""

    def __init__(self, spec: RotaryDecoderSpec, *, dtype: DTypeLike):
        super().__init__(spec, dtype=dtype)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            whole = layer.attention
            assert isinstance(whole, Attention)
            layer.attention = AttentionInParts(
                whole.layer_index,
                Projections(whole.query_key_value, whole.output, num_groups=NUM_PARTS),
                head_dim=whole.head_dim,
                rope=whole.rope,
            )
