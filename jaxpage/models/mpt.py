"""MPT (MosaicML, 2023) has ALiBi in place of positions, and LayerNorm without biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.alibi import alibi_sizes
from jaxpage.models.block_form import BlockForm
from jaxpage.models.config_fields import WrongField
from jaxpage.models.decoder_names import DecoderNames
from jaxpage.models.fields import Fields
from jaxpage.models.mlp import MLPNames
from jaxpage.models.rotary_decoder import RotaryDecoder, RotaryDecoderSpec

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
prefix = "transformer."
ignored: tuple[str, ...] = ()
ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
}
# The fields of `attn_config` that are read or refused.
ATTENTION = (
    *("attn_type", "clip_qkv", "softmax_scale", "prefix_lm", "qk_ln", "alibi", "alibi_bias_max"),
    *("attn_uses_sequence_id", "rope", "kv_n_heads", "sliding_window_size"),
)
NAMES = DecoderNames(
    tokens="wte",
    layers="blocks",
    norm="norm_f",
    attention="attn",
    fused="Wqkv",
    in_groups=False,
    output="out_proj",
)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `MptConfig`.

    Dropouts and `embedding_fraction` are for training. What MosaicML's own code has and
    transformers' has not, such as logits with a scale, is refused.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(_with_attention(config), "mpt", ALIASES) as fields:
            if not isinstance(attention := fields.get("attn_config", None), dict | None):
                error = WrongField(f"attn_config must be an object or null, not {attention!r}")
                fields.note(error, attn_config=None)
            fields.only(attn_type="multihead_attention", alibi=True, alibi_bias_max=8)
            fields.only(qk_ln=False, prefix_lm=False, attn_uses_sequence_id=False, rope=False)
            fields.only(kv_n_heads=fields.integer("num_attention_heads"), sliding_window_size=-1)
            fields.only(expansion_ratio=4, no_bias=True, logit_scale=None)
            return cls._from_fields(
                fields,
                **alibi_sizes(fields, fields.integer("max_seq_len", 2048)),
                attention_scale=fields.optional_number("softmax_scale", None),
                attention_limit=fields.optional_number("clip_qkv", None),
                plain_mlp=("up_proj", "down_proj"),
                epsilon=("layer_norm_epsilon", 1e-5),
                activation="gelu",
                form=BlockForm(norms=("norm_1", None, "norm_2", None), kind="layer-bias"),
                name="transformer",
                names=NAMES,
                mlp_names=MLPNames("ffn"),
                tied=True,
            )


def _with_attention(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with the fields of `attn_config` next to its own."""
    stated = config.get("attn_config")
    attention = stated if isinstance(stated, dict) else {}
    return {**config, **{name: attention[name] for name in ATTENTION if name in attention}}
