"""nanochat (Karpathy, 2025) has RMS norms without scales, and squared ReLU.

Token embeddings are normalised too. The rotary embedding turns in the opposite direction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float, Int

from jaxpage.models.block_form import BlockForm
from jaxpage.models.fields import Fields
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
    read_head_dim,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

FORM = BlockForm(kind="rms-plain", head_scales="none", turned_first=True)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `NanoChatConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "nanochat") as fields:
            head_dim = read_head_dim(fields)
            longest = fields.integer("max_position_embeddings", 2048)
            rope, longest = fields.rope(head_dim, longest)
            backwards = tuple(-frequency for frequency in rope.frequencies)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                head_dim=head_dim,
                max_position_embeddings=longest,
                attention_bias=fields.flag("attention_bias", False),
                rope=(dataclasses.replace(rope, frequencies=backwards), longest),
                plain_mlp=("fc1", "fc2"),
                activation=("hidden_act", "relu2"),
                logit_softcap=fields.optional_number("final_logit_softcapping", 15.0),
                norm_heads=True,
                form=FORM,
            )


class Model(RotaryDecoder):
    """Computes nanochat; see `models.base.Model`."""

    def embed(
        self, token_ids_T: Int[Array, "T"], positions_T: Int[Array, "T"]
    ) -> Float[Array, "T D"]:
        """Returns normalised embeddings; `norm` serves for them too, because it has no scale."""
        return self.norm(super().embed(token_ids_T, positions_T))
