"""AFM-4.5B and Trinity (Arcee AI, 2025).

AFM is Llama with a feed-forward half without gates. Trinity has gated attention, four norms in a
layer, and sigmoid routing; layers with windows rotate, and the others have no positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxpage.models.config import ExpertDefaults, Fields, layer_windows
from jaxpage.models.llama import Llama
from jaxpage.models.parts import ExpertNames, Gates, NormNames, PlainNames, Scope, attention
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults, ExpertsConfig


class ArceeConfig(DecoderConfig):
    """Reads transformers' `ArceeConfig`."""

    model_type = "arcee"
    defaults = Defaults(
        max_length=4096, epsilon=1e-5, activation="relu2", attention_bias=False, mlp_bias=False
    )


class Arcee(Llama, config=ArceeConfig):
    """Arcee (AFM-4.5B, 2025) is Llama with a feed-forward half without gates, of squared ReLU."""

    mlp_names = PlainNames("up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class AfmoeConfig(ExpertsConfig):
    """Reads transformers' `AfmoeConfig`.

    Attributes:
        embedding_scale: The factor of embeddings.
    """

    model_type = "afmoe"
    defaults = Defaults(head_dim=128, max_length=16_384, epsilon=1e-5, attention_bias=False)
    expert_defaults = ExpertDefaults(
        count=64,
        per_token=6,
        width=1408,
        normalized=True,
        shared_count=("num_shared_experts", 2),
        factor=("route_scale", 1.0),
        routing={"sigmoid": True, "corrected": True},
        num_dense=("num_dense_layers", 1),
    )

    embedding_scale: float

    @classmethod
    def read(cls, fields: Fields) -> AfmoeConfig:
        """Returns what the fields say."""
        # Published files have these fields; transformers' class does not.
        fields.only(score_func="sigmoid", route_norm=True, n_group=1, topk_group=1)
        fields.only(num_expert_groups=1, num_limited_groups=1)
        types = layer_windows.layer_types(fields, fields.integer("global_attn_every_n_layers", 4))
        is_scaled = fields.flag("mup_enabled", False)
        return cls.from_fields(
            fields,
            sliding_windows=layer_windows.read_windows(fields, types, 1024),
            rotates=layer_windows.slides(types),
            embedding_scale=math.sqrt(fields.integer("hidden_size")) if is_scaled else 1.0,
        )


class Afmoe(Llama, config=AfmoeConfig):
    """Trinity (Arcee AI, 2025) has gated attention, four norms in a layer, and sigmoid routing."""

    norm_names = NormNames(
        mlp_norm="pre_mlp_layernorm",
        post_attention_norm="post_attention_layernorm",
        post_mlp_norm="post_mlp_layernorm",
    )
    expert_names = ExpertNames(
        router="router.gate",
        shared=("shared_experts", None),
        correction="expert_bias",
        in_memory=("mlp", "router.gate", "expert_bias"),
    )

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer, with a gate for each channel of a head's output."""
        gates = Gates(config.kv.head_dim, "gate_proj", "g_proj")
        norms = attention.norms_of_heads(config, at)
        return attention.grouped_query_attention(config, index, at, norms=norms, gates=gates)

    def enter(self, embedded_TD: jax.Array, positions_T: jax.Array) -> jax.Array:
        """Returns the input of the first layer, made of embedded tokens."""
        return super().enter(embedded_TD, positions_T) * self.config.embedding_scale
