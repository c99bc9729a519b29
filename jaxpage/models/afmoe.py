"""Trinity (Arcee AI, 2025) has gated attention, four norms in a layer, and sigmoid routing.

A separate product computes the gates. Sliding-window layers have rotary embeddings, and the others
have none. Attention and the MLP each have a norm before and a norm after.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpage.layers.attention import Attention
from jaxpage.layers.experts import ExpertsSpec
from jaxpage.layers.linear import Linear, Part, linear
from jaxpage.models.block_form import BlockForm
from jaxpage.models.experts import ExpertNames, read_experts
from jaxpage.models.fields import Fields
from jaxpage.models.layer_windows import layer_types, windows_of
from jaxpage.models.rotary_decoder import (
    DecoderLayer,
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

FORM = BlockForm(
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_mlp_layernorm",
        "post_mlp_layernorm",
    )
)
NAMES = ExpertNames(
    router="router.gate",
    shared=("shared_experts", None),
    correction="expert_bias",
    in_memory=("mlp", "router.gate", "expert_bias"),
)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `AfmoeConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "afmoe") as fields:
            head_width = fields.integer("head_dim", 128)
            types = layer_types(fields, fields.integer("global_attn_every_n_layers", 4))
            window = fields.optional_integer("sliding_window", 1024)
            rope, longest = fields.rope(
                head_width, fields.integer("max_position_embeddings", 16_384)
            )
            num_dense = fields.integer("num_dense_layers", 1, least=0)
            is_scaled = fields.flag("mup_enabled", False)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                head_width=head_width,
                max_position_embeddings=longest,
                sliding_windows=windows_of(fields, types, window),
                attention_bias=fields.flag("attention_bias", False),
                rope=(rope, longest),
                rope_by_layer=tuple(
                    rope if kind == "sliding_attention" else None for kind in types
                ),
                epsilon=("rms_norm_eps", 1e-5),
                form=FORM,
                norm_heads=True,
                embedding_scale=math.sqrt(fields.integer("hidden_size")) if is_scaled else 1.0,
                experts=_read_experts(fields),
                expert_names=NAMES,
                sparse_layers=tuple(
                    index >= num_dense for index in range(fields.integer("num_hidden_layers"))
                ),
            )


def _read_experts(fields: Fields) -> ExpertsSpec:
    # Published files have these fields; transformers' class does not.
    fields.only(score_func="sigmoid", route_norm=True, n_group=1, topk_group=1)
    fields.only(num_expert_groups=1, num_limited_groups=1)
    width = ("moe_intermediate_size", 1408)
    factor = fields.number("route_scale", 1.0)
    return read_experts(
        fields,
        count=("num_experts", 64),
        per_token=6,
        width=width,
        normalized=True,
        routing={"sigmoid": True, "corrected": True, "factor": factor},
        shared_width=fields.integer(*width) * fields.integer("num_shared_experts", 2),
    )


class GatedAttention(Attention):
    """Computes attention whose gates come from a separate product.

    Attributes:
        gate: The product for the gates.
    """

    def __init__(self, whole: Attention, gate: Linear):
        super().__init__(
            whole.layer_index,
            whole.query_key_value,
            whole.output,
            head_width=whole.head_width,
            sliding_window=whole.sliding_window,
            rope=whole.rope,
            query_norm=whole.query_norm,
            key_norm=whole.key_norm,
            gated=True,
        )
        self.gate = gate

    def projected(
        self, x_TI: Float[Array, "T I"]
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Returns queries, each followed by its gates, keys and values."""
        q, k, v = super().projected(x_TI)
        heads = (len(q), -1, self.head_width)
        both = jnp.concatenate([q.reshape(heads), self.gate(x_TI).reshape(heads)], axis=-1)
        return both.reshape(len(q), -1), k, v


class AfmoeLayer(DecoderLayer):
    """Computes a layer whose attention has gates."""

    def __init__(self, spec: RotaryDecoderSpec, layer_index: int, *, name: str, dtype: DTypeLike):
        super().__init__(spec, layer_index, name=name, dtype=dtype)
        whole = self.attention
        assert isinstance(whole, Attention)
        part = Part(
            spec.num_query_heads * spec.kv.head_width, "heads", f"{name}.self_attn.gate_proj"
        )
        gate = linear(spec.model_width, part, input_axis="embed", bias=False, dtype=dtype)
        self.attention = GatedAttention(whole, gate)


class Model(RotaryDecoder):
    """Computes a Trinity model; see `models.base.Model`."""

    layer = AfmoeLayer
