"""EXAONE 4 and K-EXAONE (LG AI Research, 2025 and 2026), which have norms of queries and keys.

In larger models three of four layers have windows and rotate; the others have no positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flax import nnx

from jaxpage.models.config.config_fields import RefusedField
from jaxpage.models.config.corrected_experts import (
    first_dense,
    read_corrected_experts,
    sparse_by_type,
)
from jaxpage.models.config.fields import Fields
from jaxpage.models.config.layer_windows import rope_with_windows, windows_of
from jaxpage.models.config.mtp_names import unread_heads
from jaxpage.models.olmo import Olmo2
from jaxpage.models.parts import decoder_config
from jaxpage.models.parts.attention import grouped_query_attention, norms_of_heads
from jaxpage.models.parts.decoder_config import DecoderConfig, key_value_heads, read_common
from jaxpage.models.parts.experts import DEEPSEEK_NAMES, ExpertsConfig, mlp_or_experts
from jaxpage.models.parts.norms import rms_norm
from jaxpage.models.parts.scope import Scope
from jaxpage.models.qwen import Qwen3

EXPERT_NAMES = replace(DEEPSEEK_NAMES, correction="e_score_correction_bias")


def read_exaone(fields: Fields, window: int | None) -> dict[str, Any]:
    """Returns the fields of a `DecoderConfig` that both families read.

    Args:
        fields: The fields of the config.
        window: The window, where the model has any; None for a model whose layers all rotate.
    """
    head_dim = decoder_config.read_head_dim(fields)
    types = fields.layer_types(_usual_types(fields, window))
    rope, max_length = fields.rope(head_dim, fields.integer("max_position_embeddings", 2048))
    common = read_common(
        fields,
        num_kv_heads=key_value_heads(fields, 32),
        head_dim=head_dim,
        max_position_embeddings=max_length,
        sliding_windows=windows_of(fields, types, window),
        rope=(rope, max_length),
        epsilon=("rms_norm_eps", 1e-5),
    )
    by_layer = () if window is None else rope_with_windows(rope, types)
    return {**common, "rope_by_layer": by_layer}


def _usual_types(fields: Fields, window: int | None) -> list[str]:
    """Returns the types of layers that `layer_types` does not name."""
    numbers = range(1, fields.integer("num_hidden_layers") + 1)
    pattern = fields.get("sliding_window_pattern", 4)
    if window is None or fields.get("layer_types", None) is not None:
        return ["full_attention" for _ in numbers]
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 1:
        text = f"sliding_window_pattern = {pattern!r} without layer_types is not supported"
        fields.note(RefusedField(text), sliding_window_pattern=4)
        pattern = 4
    return ["sliding_attention" if number % pattern else "full_attention" for number in numbers]


class Exaone4Config(DecoderConfig):
    """Reads transformers' `Exaone4Config`."""

    model_type = "exaone4"

    @classmethod
    def read(cls, fields: Fields) -> Exaone4Config:
        """Returns what the fields say."""
        return cls(**read_exaone(fields, fields.optional_integer("sliding_window", 4096)))


class Exaone4(Olmo2, config=Exaone4Config):
    """EXAONE 4 (LG AI Research, 2025) has norms after each half of a layer and of queries and keys.

    The norms after both halves are those of OLMo 2.
    """

    # Files of EXAONE 4.5 have MTP heads, which are not loaded.
    ignored = (*Olmo2.ignored, "*mtp.*")

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        norms = norms_of_heads(config, at, rms_norm)
        return grouped_query_attention(config, index, at, norms=norms)


class ExaoneMoeConfig(ExpertsConfig):
    """Reads transformers' `ExaoneMoeConfig`."""

    model_type = "exaone_moe"

    @classmethod
    def read(cls, fields: Fields) -> ExaoneMoeConfig:
        """Returns what the fields say."""
        return cls(
            **read_exaone(fields, fields.integer("sliding_window", 4096)),
            experts=read_corrected_experts(
                fields,
                count_field="num_experts",
                shared_field="num_shared_experts",
                count=64,
                per_token=8,
                width=1024,
                groups=(1, 1),
                factor=2.5,
            ),
            sparse_layers=sparse_by_type(fields, first_dense(fields, 1)),
            draft_heads=unread_heads(fields),
        )


class ExaoneMoe(Qwen3, config=ExaoneMoeConfig):
    """K-EXAONE (LG AI Research, 2026) has EXAONE 4's sliding windows, and DeepSeek-V3's experts.

    Its norms are those of Qwen 3: before both halves, and of queries and keys.
    """

    ignored = (*Qwen3.ignored, "*mtp.*")

    @classmethod
    def make_mlp(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the feed-forward half of a layer, or its experts."""
        return mlp_or_experts(config, index, layer, names=EXPERT_NAMES)
