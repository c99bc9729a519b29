"""MiMo-V2-Flash (Xiaomi, 2026) has sinks and more key/value heads in sliding-window layers.

By default five of six layers have a sliding window. Values are multiplied by a factor. They are
narrower than keys, and the cache pads them with zeros to the width of keys. Experts are routed as
in DeepSeek-V3, and none is shared. The first layers are:

    layers           0 full   1 to 4 sliding   5 full   6 to 10 sliding   11 full
    key/value heads  4        8                4        8                 4
    sinks                     yes                       yes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxpage.layers import Attention, Projections, Rope, Scores
from jaxpage.layers.attention import Values
from jaxpage.layers.linear import Part, linear
from jaxpage.models.config import CORRECTED, Fields, layer_windows
from jaxpage.models.config.mtp_names import MtpNames, unread_heads
from jaxpage.models.parts import DEEPSEEK_EXPERTS, Defaults, ExpertsConfig, Scope, attention
from jaxpage.models.qwen import Qwen3Moe

FULL = "full_attention"
SLIDING = "sliding_attention"
THETA = {FULL: ("", 5_000_000.0), SLIDING: ("", 10_000.0)}
SHARE = 0.334  # The default `partial_rotary_factor` where `rope_type` is `default`.


@dataclass(frozen=True, kw_only=True)
class MiMoV2FlashConfig(ExpertsConfig):
    """Reads transformers' `MiMoV2FlashConfig`.

    Attributes:
        value_head_dim: The width of a value head.
        value_scale: The factor by which values are multiplied.
    """

    model_type = "mimo_v2_flash"
    aliases = {"n_routed_experts": "num_local_experts"}
    defaults = Defaults(epsilon=1e-5, attention_bias=False)
    expert_defaults = replace(CORRECTED, shared_count=None, num_dense=("", 1), has_types=True)

    value_head_dim: int
    value_scale: float

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config, in which a factor of experts that is null is 1."""
        is_null = config.get("routed_scaling_factor", 1.0) is None
        return {**config, "routed_scaling_factor": 1.0} if is_null else config

    @classmethod
    def read(cls, fields: Fields) -> MiMoV2FlashConfig:
        """Returns what the fields say."""
        num_layers = fields.integer("num_hidden_layers")
        types = fields.layer_types(
            [SLIDING if index and (index + 1) % 6 else FULL for index in range(num_layers)]
        )
        sparse = cls.expert_defaults.read_layers(fields)
        num_kv_heads, head_dim, value_width = _widths(fields, types)
        heads = tuple((num_kv_heads * (1 + (kind == SLIDING)), head_dim) for kind in types)
        _refuse_contradictions(fields, types, sparse)
        ropes, max_length = _ropes(fields, head_dim)
        return cls.from_fields(
            fields,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            kv={"heads": heads},
            sliding_windows=layer_windows.windows_of(fields, types, _window(fields)),
            rope=(ropes[FULL], max_length),
            rope_by_layer=tuple(ropes[kind] for kind in types),
            sparse_layers=sparse,
            value_head_dim=value_width,
            value_scale=fields.optional_number("attention_value_scale", 0.707) or 1.0,
        )

    @classmethod
    def read_draft_heads(cls, fields: Fields) -> MtpNames:
        """Returns the names of MTP heads, which are not loaded."""
        return unread_heads(fields, "model.mtp.")


def _widths(fields: Fields, types: Sequence[str]) -> tuple[int, int, int]:
    """Returns the number of key/value heads of full layers, and the widths of keys and values."""
    num_kv_heads = fields.integer("num_key_value_heads", 4)
    num_heads = fields.integer("num_attention_heads")
    if SLIDING in types and num_heads % (2 * num_kv_heads):
        text = (
            f"num_attention_heads = {num_heads} must be a multiple of twice num_key_value_heads "
            f"= {num_kv_heads} (sliding-window layers)"
        )
        fields.note_wrong(text, num_key_value_heads=num_heads, num_attention_heads=num_heads)
    head_dim = fields.integer("head_dim", 192)
    value_width = fields.integer("v_head_dim", 128)
    if value_width > head_dim:
        text = f"v_head_dim = {value_width} above head_dim = {head_dim} is not supported"
        fields.note_unsupported(text, v_head_dim=head_dim, head_dim=head_dim)
    fields.only(swa_num_attention_heads=num_heads, swa_num_key_value_heads=2 * num_kv_heads)
    fields.only(swa_head_dim=head_dim, swa_v_head_dim=value_width)
    return num_kv_heads, head_dim, min(value_width, head_dim)


def _window(fields: Fields) -> int:
    """Returns the window; `sliding_window_size` does not count the token itself."""
    size = fields.optional_integer("sliding_window_size", None)
    return fields.integer("sliding_window", 129) if size is None else size + 1


def _ropes(fields: Fields, head_dim: int) -> tuple[dict[str, Rope], int]:
    """Returns the rotation of each type of layer, and the number of positions."""
    layer_windows.refuse_rope_scaling(fields)
    # transformers reads none of these.
    fields.only(rope_theta=5_000_000, swa_rope_theta=10_000, partial_rotary_factor=SHARE)
    ropes = fields.get("rope_parameters", None)
    if isinstance(ropes, dict):
        fields.config["rope_parameters"] = {
            # In transformers a scaled rotation has another default of this share than a plain one.
            kind: {"partial_rotary_factor": 1.0, **each} if _is_scaled(each) else each
            for kind, each in ropes.items()
        }
    max_length = fields.integer("max_position_embeddings", 131_072)
    return fields.ropes_by_type(head_dim, max_length, THETA, partial=SHARE)


def _is_scaled(rope: Any) -> bool:
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    return kind not in (None, "default")


def _refuse_contradictions(fields: Fields, types: Sequence[str], sparse: Sequence[bool]) -> None:
    """Refuses further fields of published files that contradict the fields that are read."""
    fields.only(hybrid_layer_pattern=[int(kind == SLIDING) for kind in types])
    fields.only(moe_layer_freq=[int(each) for each in sparse])
    fields.only(scoring_func="sigmoid", topk_method="noaux_tc", n_shared_experts=0)
    fields.only(add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False)
    fields.only(layernorm_epsilon=fields.number("rms_norm_eps", 1e-5))


class MiMoV2Flash(Qwen3Moe, config=MiMoV2FlashConfig):
    """MiMo-V2-Flash (Xiaomi, 2026) has sinks and more key/value heads in sliding-window layers."""

    expert_names = DEEPSEEK_EXPERTS

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> Attention:
        """Returns the attention of a layer."""
        num_heads = config.num_query_heads
        num_kv_heads, head_dim = config.kv.heads_of(index)
        window = config.kv.sliding_windows[index]
        value_rows = num_heads * config.value_head_dim
        parts = (
            Part(num_heads * head_dim, "heads", (at / "q_proj").name),
            Part(num_kv_heads * head_dim, "kv_heads", (at / "k_proj").name),
            Part(num_kv_heads * config.value_head_dim, "kv_heads", (at / "v_proj").name),
        )
        bias = config.attention_bias
        width = config.hidden_size
        sinks = None
        if window is not None:
            sinks = attention.attention_sinks(
                config, at / "attention_sink_bias", (at / "sinks").name
            )
        return Attention(
            index,
            Projections(
                linear(width, *parts, input_axis="embed", bias=bias, dtype=at.dtype),
                at.projection(value_rows, ("o_proj", width), axes=("heads", "embed")),
            ),
            head_dim=head_dim,
            rope=config.rope_of(index),
            scores=Scores(sliding_window=window, sinks=sinks),
            values=Values(config.value_head_dim, config.value_scale),
        )
