"""OLMo Hybrid (Ai2, 2026) is OLMo 2 with a gated delta rule in three of four layers.

These layers have norms before the delta rule and before the MLP. The others have norms after
attention and after the MLP, as in OLMo 2. Published models have no rotary embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxpage.layers.delta_net import DeltaWidths
from jaxpage.layers.rope import NO_ROTATION, Rope
from jaxpage.models.config.delta_config import check_activation, check_heads
from jaxpage.models.config.fields import Fields
from jaxpage.models.config.mtp_names import unread_heads
from jaxpage.models.olmo import Olmo2
from jaxpage.models.parts import decoder_config
from jaxpage.models.parts.block import Block
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.norms import rms_norm
from jaxpage.models.parts.recurrences import delta_net_of_tensors
from jaxpage.models.parts.scope import Scope

FULL = "full_attention"
LINEAR = "linear_attention"


@dataclass(frozen=True, kw_only=True)
class OlmoHybridConfig(DecoderConfig):
    """Reads transformers' `OlmoHybridConfig`.

    Attributes:
        recurrent: The layers of which `kv.states` has a state.
    """

    model_type = "olmo_hybrid"
    defaults = Defaults(attention_bias=False)

    recurrent: DeltaWidths

    @classmethod
    def read(cls, fields: Fields) -> OlmoHybridConfig:
        """Returns what the fields say."""
        check_activation(fields)
        types = _layer_types(fields)
        delta = _read_delta(fields)
        head_dim = decoder_config.read_head_dim(fields)
        rope, max_length = _read_rope(fields, head_dim)
        return cls.from_fields(
            fields,
            head_dim=head_dim,
            kv={"states": tuple(delta.state if kind == LINEAR else None for kind in types)},
            rope=(rope, max_length),
            recurrent=delta,
            draft_heads=unread_heads(fields),
        )


def _layer_types(fields: Fields) -> tuple[str, ...]:
    """Returns the kinds of the layers.

    By default every fourth has attention. If there are fewer than four, the last one has.
    """
    numbers = range(1, fields.integer("num_hidden_layers") + 1)
    usual = [LINEAR if number % 4 else FULL for number in numbers]
    if FULL not in usual:
        usual[-1] = FULL
    return fields.layer_types(usual, kinds=(FULL, LINEAR))


def _read_delta(fields: Fields) -> DeltaWidths:
    heads = fields.integer("num_attention_heads")
    key_heads = fields.optional_integer("linear_num_key_heads", None) or heads
    share = int(0.75 * fields.integer("hidden_size") / key_heads)
    key = fields.optional_integer("linear_key_head_dim", None) or share
    widths = DeltaWidths(
        key_heads=key_heads,
        value_heads=fields.optional_integer("linear_num_value_heads", None) or heads,
        key=key,
        value=fields.optional_integer("linear_value_head_dim", None) or 2 * key,
        kernel=fields.integer("linear_conv_kernel_dim", 4),
        apart=True,
        beta_factor=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0,
        epsilon=1e-5,
    )
    check_heads(fields, widths)
    return widths


def _read_rope(fields: Fields, head_dim: int) -> tuple[Rope, int]:
    """Returns the rotary embedding and its number of positions.

    There is no rotary embedding if `rope_theta` is null.
    """
    max_length = fields.integer("max_position_embeddings", 65_536)
    rope = fields.get("rope_scaling", None) or fields.get("rope_parameters", None) or {}
    theta = fields.get("rope_theta", 10_000.0)
    if isinstance(rope, dict):
        theta = rope.get("rope_theta", theta)
    return (NO_ROTATION, max_length) if theta is None else fields.rope(head_dim, max_length)


class OlmoHybrid(Olmo2, config=OlmoHybridConfig):
    """OLMo Hybrid (Ai2, 2026) is OLMo 2 with a gated delta rule in three of four layers."""

    # Older files, and those that transformers saves, have the second names.
    renamed = {
        "input_layernorm": "attention_layer_norm",
        "post_attention_layernorm": "feedforward_layer_norm",
    }

    @classmethod
    def make_block(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns a layer, which is that of OLMo 2 where it keeps no state."""
        if config.kv.state_of(index) is None:
            return super().make_block(config, index, at)
        return Block(
            attention_norm=rms_norm(config, at / "input_layernorm"),
            attention=delta_net_of_tensors(config, config.recurrent, index, at / "linear_attn"),
            mlp_norm=rms_norm(config, at / "post_attention_layernorm"),
            mlp=cls.make_mlp(config, index, at),
        )
