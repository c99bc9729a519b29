"""nanochat (Karpathy, 2025) has RMS norms without scales, and squared ReLU.

Token embeddings are normalised too. The rotary embedding turns in the opposite direction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx

from jaxpage.models.config.fields import Fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts.attention import grouped_query_attention, norms_of_heads
from jaxpage.models.parts.decoder import cap_logits
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults, read_head_dim
from jaxpage.models.parts.mlp import plain_mlp
from jaxpage.models.parts.norms import unscaled_rms_norm
from jaxpage.models.parts.scope import Scope


@dataclass(frozen=True, kw_only=True)
class NanoChatConfig(DecoderConfig):
    """Reads transformers' `NanoChatConfig`.

    Attributes:
        logit_softcap: The soft cap of logits; None for none.
    """

    model_type = "nanochat"
    defaults = Defaults(activation="relu2", attention_bias=False)

    logit_softcap: float | None

    @classmethod
    def read(cls, fields: Fields) -> NanoChatConfig:
        """Returns what the fields say."""
        rope, reach = cls.defaults.read_rope(fields, read_head_dim(fields))
        backwards = tuple(-frequency for frequency in rope.frequencies)
        return cls.from_fields(
            fields,
            rope=(replace(rope, frequencies=backwards), reach),
            logit_softcap=fields.optional_number("final_logit_softcapping", 15.0),
        )


class NanoChat(Llama, config=NanoChatConfig):
    """nanochat (Karpathy, 2025) has RMS norms without scales, and squared ReLU.

    Token embeddings are normalised too. The rotary embedding turns in the opposite direction.
    """

    make_norm = staticmethod(unscaled_rms_norm)

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        norms = norms_of_heads(config, at, unscaled_rms_norm, after_rotation=True)
        return grouped_query_attention(config, index, at, norms=norms)

    @classmethod
    def make_mlp(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the feed-forward half of a layer."""
        return plain_mlp(config, layer / "mlp", "fc1", "fc2")

    def enter(self, embedded_TD: jax.Array, positions_T: jax.Array) -> jax.Array:
        """Returns normalised embeddings; `norm` serves for them too, because it has no scale."""
        return self.norm(super().enter(embedded_TD, positions_T))

    def logits(self, hidden_BD: jax.Array) -> jax.Array:
        """Returns the logits in float32."""
        return cap_logits(super().logits(hidden_BD), self.config.logit_softcap)
