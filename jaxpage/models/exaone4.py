"""EXAONE 4 (LG AI Research, 2025) has norms after both halves of a layer, and of queries and keys.

In its larger models three of four layers have windows and rotate; the others have no positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models import rotary_decoder
from jaxpage.models.block_form import BlockForm
from jaxpage.models.config_fields import RefusedField
from jaxpage.models.fields import Fields
from jaxpage.models.layer_windows import rope_with_windows, windows_of
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    key_value_heads,
    prefix,
    read_head_dim,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
# Files of EXAONE 4.5 have MTP heads, which are not loaded.
ignored = (*rotary_decoder.ignored, "*mtp.*")
FORM = BlockForm(norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm"))


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Exaone4Config`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "exaone4") as fields:
            head_dim = read_head_dim(fields)
            longest = fields.integer("max_position_embeddings", 2048)
            window = fields.optional_integer("sliding_window", 4096)
            types = fields.layer_types(usual_types(fields, window))
            rope, longest = fields.rope(head_dim, longest)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 32),
                head_dim=head_dim,
                max_position_embeddings=longest,
                sliding_windows=windows_of(fields, types, window),
                rope=(rope, longest),
                rope_by_layer=() if window is None else rope_with_windows(rope, types),
                epsilon=("rms_norm_eps", 1e-5),
                form=FORM,
                norm_heads=True,
            )


def usual_types(fields: Fields, window: int | None) -> list[str]:
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
