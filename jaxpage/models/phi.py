"""Phi 1 to 4 (Microsoft, 2023 and 2024), of which Phi-3.5-MoE has experts.

Phi-1 to 2 compute both halves of a layer in parallel; Phi-3 and 4 are Llama with fused products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxpage.layers import HeadNorms, Rope
from jaxpage.layers.rope_scaling import LENGTH
from jaxpage.models.config import ExpertDefaults, Fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts import NormNames, PlainNames, Scope, attention, norms
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults, ExpertsConfig
from jaxpage.models.parts.names import AttentionNames, ExpertNames, ModuleNames

MOE_THETA = 1_000_000.0
OLDER_ROPE_TYPES = {"su": "longrope", "yarn": "longrope"}


@dataclass(frozen=True, kw_only=True)
class PhiConfig(DecoderConfig):
    """Reads transformers' `PhiConfig`. Dropouts are for training.

    Attributes:
        qk_layernorm: True if queries and keys have norms.
    """

    model_type = "phi"
    defaults = Defaults(partial=0.5, epsilon=("layer_norm_eps", 1e-5), activation="gelu_new")

    qk_layernorm: bool

    @classmethod
    def read(cls, fields: Fields) -> PhiConfig:
        """Returns what the fields say."""
        return cls.from_fields(
            fields,
            head_dim=fields.divide("hidden_size", "num_attention_heads"),
            attention_bias=True,
            mlp_bias=True,
            qk_layernorm=fields.flag("qk_layernorm", False),
        )


class Phi(Llama, config=PhiConfig):
    """Phi-1, 1.5 and 2 (Microsoft, 2023) compute both halves of a layer in parallel with LayerNorm.

    They rotate half of each head, and have biases everywhere.
    """

    names = ModuleNames(norm="final_layernorm")
    norm_names = NormNames(mlp_norm=None)
    attention_names = AttentionNames(output="dense")
    mlp_names = PlainNames("fc1", "fc2")
    make_norm = staticmethod(norms.layer_norm)

    @classmethod
    def is_parallel(cls, config: Any) -> bool:
        """Returns True: both halves of a layer take its input."""
        return True

    @classmethod
    def has_head_bias(cls, config: Any) -> bool:
        """Returns True: logits have biases."""
        return True

    @classmethod
    def make_head_norms(cls, config: Any, at: Scope) -> HeadNorms:
        """Returns the norms of queries and keys, which the config may ask for."""
        if not config.qk_layernorm:
            return HeadNorms()
        names = ("q_layernorm", "k_layernorm")
        return attention.norms_of_heads(config, at, norms.layer_norm, names=names)


class Phi3Config(DecoderConfig):
    """Reads transformers' `Phi3Config`.

    With LongRoPE a sequence may be as long as the original context: see `make_rope`.
    """

    model_type = "phi3"
    defaults = Defaults(has_window=True, epsilon=1e-5)

    @classmethod
    def read(cls, fields: Fields) -> Phi3Config:
        """Returns what the fields say."""
        head_dim = fields.divide("hidden_size", "num_attention_heads")
        max_length = fields.integer("max_position_embeddings", 4096)
        return cls.from_fields(
            fields,
            head_dim=head_dim,
            rope=fields.rope(
                head_dim, max_length, partial=1.0, aliases=OLDER_ROPE_TYPES, original=4096
            ),
        )


class Phi3(Llama, config=Phi3Config):
    """Phi-3 and Phi-4 (Abdin et al., 2024) are Llama with fused products.

    Some of them rotate only a part of each head.
    """


@dataclass(frozen=True, kw_only=True)
class PhimoeConfig(ExpertsConfig):
    """Reads transformers' `PhimoeConfig`.

    The noise of inputs is for training; that of the router decides which experts are close.

    Attributes:
        lm_head_bias: True if logits have biases.
    """

    model_type = "phimoe"
    aliases = {"num_local_experts": "num_experts"}
    defaults = Defaults(num_kv_heads=8, has_window=True, epsilon=1e-5, attention_bias=False)
    expert_defaults = ExpertDefaults(
        count_field="num_local_experts",
        count=16,
        per_token=2,
        width_field="intermediate_size",
        width=6400,
        normalized=True,
    )

    lm_head_bias: bool

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config, where the length in the dict outranks the one at the top."""
        scaling = config.get("rope_parameters") or config.get("rope_scaling")
        has_length = isinstance(scaling, dict) and LENGTH in scaling
        return {name: config[name] for name in config if name != LENGTH or not has_length}

    @classmethod
    def read(cls, fields: Fields) -> PhimoeConfig:
        """Returns what the fields say."""
        # Sparse mixing (Phi-3.5-MoE) is defined for two experts: each has its own softmax.
        fields.only(num_experts_per_tok=2)
        head_dim = fields.head_dim()
        rope, max_length = _read_moe_rope(fields, head_dim)
        return cls.from_fields(
            fields,
            head_dim=head_dim,
            rope=(rope, max_length),
            lm_head_bias=fields.flag("lm_head_bias", False),
            experts=cls.expert_defaults.read(
                fields, routing={"jitter": fields.number("router_jitter_noise", 0.01)}
            ),
        )


def _read_moe_rope(fields: Fields, head_dim: int) -> tuple[Rope, int]:
    """Returns the rotation and its length; a scaled one has its own factor of sines."""
    max_length = fields.integer("max_position_embeddings", 131_072)
    rope, max_length = fields.rope(head_dim, max_length, theta=MOE_THETA)
    parameters = fields.rope_parameters(max_length, MOE_THETA)
    if parameters["rope_type"] != "default":
        factor = parameters.get("short_mscale")
        if not isinstance(factor, int | float) or not 0 < factor < 1e30:
            text = f"rope short_mscale must be a positive number, not {factor!r}"
            fields.note_wrong(text, rope_scaling=None, rope_parameters=None)
            factor = 1.0
        # Phi-3.5-MoE has `short_mscale` in the place of the factor that LongRoPE computes.
        rope = replace(rope, attention_factor=float(factor))
    return rope, max_length


class Phimoe(Llama, config=PhimoeConfig):
    """Phi-3.5-MoE (Microsoft, 2024) weighs each of two experts among those that are close to it.

    It has LayerNorm.
    """

    make_norm = staticmethod(norms.layer_norm)
    expert_names = ExpertNames(
        "block_sparse_moe", "w1", "w3", "w2", in_memory=("mlp", "router", "")
    )

    @classmethod
    def has_head_bias(cls, config: Any) -> bool:
        """Returns whether logits have biases."""
        return bool(config.lm_head_bias)
