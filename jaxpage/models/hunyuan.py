"""HunYuan (Tencent, 2025), dense and with experts, has norms of queries and keys after rotating."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from jaxpage.models.config import NO_ROPE, REQUIRED, ExpertDefaults, Fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts import DecoderConfig, Defaults, ExpertNames, ExpertsConfig, attention

HEAD_NORMS = ("query_layernorm", "key_layernorm")
DEFAULTS = Defaults(epsilon=1e-5, attention_bias=False)


def replace_alpha(fields: Fields) -> None:
    """Replaces a "dynamic" rope with `alpha` by one with a larger base at every length."""
    head_dim = fields.head_dim()
    max_length = fields.integer("max_position_embeddings", 2048)
    parameters = fields.rope_parameters(max_length, 10_000.0)
    alpha = parameters.get("alpha")
    if parameters["rope_type"] != "dynamic" or not alpha:
        return
    theta = parameters["rope_theta"]
    numbers = [alpha, theta]
    if all(isinstance(each, int | float) and 0 < each < 1e30 for each in numbers):
        # The NTK formula (bloc97, 2023), applied once for all lengths and not as a text grows.
        stretched = float(theta) * float(alpha) ** (head_dim / (head_dim - 2))
        fields.config |= {
            **dict.fromkeys(("rope_scaling", "rope_theta")),
            "rope_parameters": {"rope_type": "default", "rope_theta": stretched},
        }
    else:
        text = f"rope alpha and rope_theta must be positive numbers, not {numbers}"
        fields.note_wrong(text, **NO_ROPE)


class HunYuanDenseConfig(DecoderConfig):
    """Reads transformers' `HunYuanDenseV1Config`."""

    model_type = "hunyuan_v1_dense"
    defaults = DEFAULTS

    @classmethod
    def read(cls, fields: Fields) -> HunYuanDenseConfig:
        """Returns what the fields say."""
        replace_alpha(fields)
        return cls.from_fields(fields)


class HunYuanDense(Llama, config=HunYuanDenseConfig):
    """HunYuan, dense (Tencent, 2025), is Llama with norms of queries and keys after rotation."""

    make_head_norms = staticmethod(
        functools.partial(attention.norms_of_heads, names=HEAD_NORMS, after_rotation=True)
    )


class HunYuanMoeConfig(ExpertsConfig):
    """Reads transformers' `HunYuanMoEV1Config`."""

    model_type = "hunyuan_v1_moe"
    aliases = {"num_experts_per_tok": "moe_topk", "num_experts": "num_local_experts"}
    defaults = DEFAULTS
    expert_defaults = ExpertDefaults(
        count=1,
        per_token=1,
        width_field="intermediate_size",
        width=REQUIRED,
        normalized=True,
        shared_width=("intermediate_size", REQUIRED),
    )

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config with one number where published files have it for each layer."""
        names = {"moe_topk", "num_experts"} & config.keys()
        return {**config, **{name: _one_of(config[name]) for name in names}}

    @classmethod
    def read(cls, fields: Fields) -> HunYuanMoeConfig:
        """Returns what the fields say."""
        replace_alpha(fields)
        return cls.from_fields(fields)


def _one_of(value: Any) -> Any:
    """Returns the number that all layers have, or what is there if it is no such list."""
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        return value[0]
    return value


class HunYuanMoe(HunYuanDense, config=HunYuanMoeConfig):
    """HunYuan A13B (Tencent, 2025) has experts in all layers, one of them for all tokens."""

    expert_names = ExpertNames(
        router="gate.wg", shared=("shared_mlp", None), in_memory=("mlp", "gate.wg", "")
    )
