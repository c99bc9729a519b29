"""EXAONE 4 and K-EXAONE (LG AI Research, 2025 and 2026), which have norms of queries and keys.

In larger models three of four layers have windows and rotate; the others have no positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxpage.models.config import CORRECTED, Fields, layer_windows, mtp_names
from jaxpage.models.olmo import Olmo2
from jaxpage.models.parts import DEEPSEEK_EXPERTS, DecoderConfig, Defaults, ExpertsConfig, attention
from jaxpage.models.qwen import Qwen3

DEFAULTS = Defaults(num_kv_heads=32, epsilon=1e-5)


def read_layers(fields: Fields, window: int | None) -> dict[str, Any]:
    """Returns the arguments of `from_fields` that say which layers have windows, and which rotate.

    Args:
        fields: The fields of the config.
        window: The window, where the model has any; None for a model whose layers all rotate.
    """
    types = fields.layer_types(_usual_types(fields, window))
    rotates = None if window is None else layer_windows.slides(types)
    return {"sliding_windows": layer_windows.windows_of(fields, types, window), "rotates": rotates}


def _usual_types(fields: Fields, window: int | None) -> list[str]:
    """Returns the types of layers that `layer_types` does not name."""
    numbers = range(1, fields.integer("num_hidden_layers") + 1)
    pattern = fields.get("sliding_window_pattern", 4)
    if window is None or fields.get("layer_types", None) is not None:
        return ["full_attention" for _ in numbers]
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 1:
        text = f"sliding_window_pattern = {pattern!r} without layer_types is not supported"
        fields.note_unsupported(text, sliding_window_pattern=4)
        pattern = 4
    return ["sliding_attention" if number % pattern else "full_attention" for number in numbers]


class Exaone4Config(DecoderConfig):
    """Reads transformers' `Exaone4Config`."""

    model_type = "exaone4"
    defaults = DEFAULTS

    @classmethod
    def read(cls, fields: Fields) -> Exaone4Config:
        """Returns what the fields say."""
        window = fields.optional_integer("sliding_window", 4096)
        return cls.from_fields(fields, **read_layers(fields, window))


class Exaone4(Olmo2, config=Exaone4Config):
    """EXAONE 4 (LG AI Research, 2025) has norms after each half of a layer and of queries and keys.

    The norms after both halves are those of OLMo 2.
    """

    # Files of EXAONE 4.5 have MTP heads, which are not loaded.
    ignored = (*Olmo2.ignored, "*mtp.*")
    make_head_norms = staticmethod(attention.norms_of_heads)


class ExaoneMoeConfig(ExpertsConfig):
    """Reads transformers' `ExaoneMoeConfig`."""

    model_type = "exaone_moe"
    defaults = DEFAULTS
    expert_defaults = replace(
        CORRECTED,
        count_field="num_experts",
        count=64,
        width=1024,
        shared_count=("num_shared_experts", 1),
        factor=("routed_scaling_factor", 2.5),
        num_dense=("first_k_dense_replace", 1),
        has_types=True,
    )
    read_draft_heads = staticmethod(mtp_names.unread_heads)

    @classmethod
    def read(cls, fields: Fields) -> ExaoneMoeConfig:
        """Returns what the fields say."""
        return cls.from_fields(
            fields,
            **read_layers(fields, fields.integer("sliding_window", 4096)),
        )


class ExaoneMoe(Qwen3, config=ExaoneMoeConfig):
    """K-EXAONE (LG AI Research, 2026) has EXAONE 4's sliding windows, and DeepSeek-V3's experts.

    Its norms are those of Qwen 3: before both halves, and of queries and keys.
    """

    ignored = (*Qwen3.ignored, "*mtp.*")
    expert_names = replace(DEEPSEEK_EXPERTS, correction="e_score_correction_bias")
