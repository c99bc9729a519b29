"""ERNIE 4.5 (Baidu, 2025), dense and with experts, is Llama that rotates interleaved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxpage.models.config import ExpertDefaults, Fields
from jaxpage.models.config.mtp_names import MtpNames, unread_heads
from jaxpage.models.llama import Llama
from jaxpage.models.parts import DecoderConfig, Defaults, ExpertNames, ExpertsConfig

DEFAULTS = Defaults(
    num_kv_heads=2,
    max_length=131_072,
    theta=500_000.0,
    interleaved=True,
    epsilon=1e-5,
    tied=True,
    all_biases=("use_bias", False),
)


class Ernie4_5Config(DecoderConfig):
    """Reads transformers' `Ernie4_5Config`."""

    model_type = "ernie4_5"
    defaults = replace(DEFAULTS, head_dim=128, has_null_head_dim=True)


class Ernie4_5(Llama, config=Ernie4_5Config):
    """ERNIE 4.5, dense (Baidu, 2025), is Llama that rotates interleaved."""


class Ernie4_5MoeConfig(ExpertsConfig):
    """Reads transformers' `Ernie4_5_MoeConfig`.

    `moe_norm_min` is a bound of sums that no sum of softmax scores reaches.
    """

    model_type = "ernie4_5_moe"
    aliases = {"moe_num_experts": "num_experts", "num_experts_per_tok": "moe_k"}
    defaults = replace(DEFAULTS, num_kv_heads=4)
    expert_defaults = ExpertDefaults(
        count_field="moe_num_experts",
        count=64,
        per_token=6,
        width=1536,
        normalized=True,
        routing={"corrected": True},
    )

    @classmethod
    def read(cls, fields: Fields) -> Ernie4_5MoeConfig:
        """Returns what the fields say."""
        fields.only(moe_norm_min=1e-12)
        experts = cls.expert_defaults.read(fields)
        num_shared = fields.integer("moe_num_shared_experts", 2, minimum=0)
        return cls.from_fields(
            fields,
            experts=replace(experts, shared_width=num_shared * experts.width or None),
            sparse_layers=_sparse_layers(fields),
        )

    @classmethod
    def read_draft_heads(cls, fields: Fields) -> MtpNames:
        """Returns the names of MTP heads, which are not loaded."""
        return unread_heads(fields, "model.mtp_")


def _sparse_layers(fields: Fields) -> tuple[bool, ...]:
    num_layers = fields.integer("num_hidden_layers")
    every = fields.integer("moe_layer_interval", 1)
    first = fields.integer("moe_layer_start_index", 1, minimum=0)
    last = fields.integer("moe_layer_end_index", -1, minimum=-1)
    last = num_layers - 1 if last == -1 else last
    return tuple((index + 1) % every == 0 and first <= index <= last for index in range(num_layers))


class Ernie4_5Moe(Llama, config=Ernie4_5MoeConfig):
    """ERNIE 4.5 with experts (Baidu, 2025) chooses experts by softmax with corrections."""

    # Published files have one MTP head: `model.mtp_block.0`, `model.mtp_emb_norm.0` and others.
    ignored = (*Llama.ignored, "*mtp*")
    expert_names = ExpertNames(
        shared=("shared_experts", None),
        correction="moe_statics.e_score_correction_bias",
        corrections_in_row=True,
        in_memory=("mlp", "gate", "gate.moe_statics.e_score_correction_bias"),
    )

    @classmethod
    def has_head_bias(cls, config: Any) -> bool:
        """Returns whether logits have biases, as all products have then."""
        return bool(config.mlp_bias)
