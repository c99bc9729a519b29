"""Qwen 2 and 3 (Alibaba, 2024 and 2025), each with a mixture of experts as well.

Qwen 2 has biases on queries, keys and values; Qwen 3 has norms of queries and keys in their place.
Qwen2-MoE has one expert that takes all tokens, and Qwen3-MoE has none. MiMo-7B (Xiaomi, 2025) is
Qwen 2 with MTP heads, which are not loaded.
"""

from __future__ import annotations

from typing import Any

from flax import nnx

from jaxpage.models.config.config_fields import RefusedField
from jaxpage.models.config.experts import read_experts, sparse_layers
from jaxpage.models.config.fields import Fields
from jaxpage.models.config.layer_windows import windows_by_layer
from jaxpage.models.config.mtp_names import MtpNames, counts_heads, unread_heads
from jaxpage.models.llama import Llama
from jaxpage.models.parts.attention import grouped_query_attention, norms_of_heads
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.experts import ExpertNames, ExpertsConfig
from jaxpage.models.parts.norms import rms_norm
from jaxpage.models.parts.scope import Scope


class Qwen2Config(DecoderConfig):
    """Reads transformers' `Qwen2Config`."""

    model_type = "qwen2"
    defaults = Defaults(num_kv_heads=32, max_length=32768)

    @classmethod
    def read(cls, fields: Fields) -> Qwen2Config:
        """Returns what the fields say."""
        return cls.from_fields(
            fields,
            sliding_windows=windows_by_layer(fields),
            attention_bias=True,
            draft_heads=_read_mimo_heads(fields),
        )


def _read_mimo_heads(fields: Fields) -> MtpNames | None:
    """Returns the names of the MTP heads of MiMo-7B; None if the config does not count heads.

    Their product takes the hidden state before the embedding, and `MtpHead` has them in the other
    order, so that they are not read.
    """
    return unread_heads(fields, "model.mtp_layers.") if counts_heads(fields) else None


class Qwen2(Llama, config=Qwen2Config):
    """Qwen2 and Qwen2.5 (Yang et al., 2024) are Llama with biases on queries, keys and values."""

    output_bias = False


class Qwen3Config(DecoderConfig):
    """Reads transformers' `Qwen3Config`.

    An absent `head_dim` is 128, whatever the width of the model.
    """

    model_type = "qwen3"
    defaults = Defaults(num_kv_heads=32, head_dim=128, max_length=32768, attention_bias=False)

    @classmethod
    def read(cls, fields: Fields) -> Qwen3Config:
        """Returns what the fields say."""
        return cls.from_fields(fields, sliding_windows=windows_by_layer(fields))


class Qwen3(Llama, config=Qwen3Config):
    """Qwen3, dense (Yang et al., 2025), has norms of queries and keys in place of biases."""

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        return grouped_query_attention(
            config, index, at, norms=norms_of_heads(config, at, rms_norm)
        )


class Qwen2MoeConfig(ExpertsConfig):
    """Reads transformers' `Qwen2MoeConfig`."""

    model_type = "qwen2_moe"
    defaults = Defaults(num_kv_heads=16, max_length=32768)

    @classmethod
    def read(cls, fields: Fields) -> Qwen2MoeConfig:
        """Returns what the fields say."""
        if fields.flag("use_sliding_window", False):
            text = "use_sliding_window = true is not supported for this family"
            fields.note(RefusedField(text), use_sliding_window=False)
        return cls.from_fields(
            fields,
            attention_bias=fields.flag("qkv_bias", True),
            experts=read_experts(
                fields,
                count=("num_experts", 60),
                per_token=4,
                width=("moe_intermediate_size", 1408),
                normalized=None,
                shared_width=fields.integer("shared_expert_intermediate_size", 5632),
            ),
            sparse_layers=sparse_layers(fields),
        )


class Qwen2Moe(Qwen2, config=Qwen2MoeConfig):
    """Qwen2 with experts (Yang et al., 2024) has one expert that takes all tokens."""


class Qwen3MoeConfig(ExpertsConfig):
    """Reads transformers' `Qwen3MoeConfig`.

    A window, where it is used, is the window of all layers.
    """

    model_type = "qwen3_moe"
    aliases = {"num_experts": "num_local_experts"}
    defaults = Defaults(num_kv_heads=4, max_length=32768, attention_bias=False)

    @classmethod
    def read(cls, fields: Fields) -> Qwen3MoeConfig:
        """Returns what the fields say."""
        window = None
        if fields.flag("use_sliding_window", False):
            window = fields.optional_integer("sliding_window", 4096)
        return cls.from_fields(
            fields,
            sliding_windows=window,
            experts=read_experts(
                fields,
                count=("num_experts", 128),
                per_token=8,
                width=("moe_intermediate_size", 768),
                normalized=None,
            ),
            sparse_layers=sparse_layers(fields),
        )


class Qwen3Moe(Qwen3, config=Qwen3MoeConfig):
    """Qwen3 with experts (Yang et al., 2025) has experts in the layers that its config names."""


class Qwen3VLMoeText(Qwen3Moe):
    """Qwen3-VL with experts, text (2025), is Qwen3 with experts whose files have them stacked."""

    expert_names = ExpertNames(only_stacked=True, in_rows_too=True)
