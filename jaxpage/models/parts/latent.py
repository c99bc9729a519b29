"""Makes latent attention, and reads what configs say of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from jaxpage.layers import Linear, RMSNorm, Rope, Scores
from jaxpage.layers.latent_attention import (
    LatentAttention,
    LatentProjections,
    LatentQueries,
    LatentWidths,
)
from jaxpage.models.config import Fields
from jaxpage.models.config.fields import NO_ROPE
from jaxpage.models.parts.decoder_config import DecoderConfig
from jaxpage.models.parts.names import Scope

NORM_EPSILON = 1e-6  # The norms of latents have it, whatever the config says of other norms.


@dataclass(frozen=True)
class LatentSpec:
    """Describes the latent attention of a model.

    Attributes:
        widths: The widths of the heads and of the latents.
        scale: The factor of the scores.
        bias: True if the products that make latents, and that of the output, have biases.
    """

    widths: LatentWidths
    scale: float
    bias: bool


@dataclass(frozen=True, kw_only=True)
class LatentDefaults:
    """Says what a family takes in the place of fields of latent attention that a config.json lacks.

    Attributes:
        query_rank: In the place of `q_lora_rank`; None if queries have no latent.
        plain: In the place of `qk_nope_head_dim`.
        value: In the place of `v_head_dim`.
        rank: In the place of `kv_lora_rank`.
        has_share: True if `partial_rotary_factor` says which share of a head is rotated.
        has_indexer: True if an indexer chooses what a query attends to; see `read_indexed`.
    """

    query_rank: int | None
    plain: int = 128
    value: int = 128
    rank: int = 512
    has_share: bool = False
    has_indexer: bool = False

    def read_widths(self, fields: Fields) -> LatentWidths:
        """Returns the widths of latent attention."""
        return LatentWidths(
            rank=fields.integer("kv_lora_rank", self.rank),
            rotated=fields.integer("qk_rope_head_dim", 64),
            plain=fields.integer("qk_nope_head_dim", self.plain),
            value=fields.integer("v_head_dim", self.value),
            query_rank=fields.optional_integer("q_lora_rank", self.query_rank),
        )

    def read(self, fields: Fields, max_length: int) -> dict[str, Any]:
        """Returns the arguments of `DecoderConfig.from_fields` for a decoder with it.

        Args:
            fields: The fields of the config.
            max_length: The default of `max_position_embeddings`.
        """
        if self.has_indexer:
            return self.read_indexed(fields, max_length)
        fields.only(moe_layer_freq=1, ep_size=1)
        widths = self.read_widths(fields)
        max_length = fields.integer("max_position_embeddings", max_length)
        if self.has_share:
            rope, length = _read_share(fields, widths, max_length)
        else:
            rope, length = fields.rope(widths.rotated, max_length)
        rope = replace(rope, interleaved=fields.flag("rope_interleave", True))
        # Squared, because YaRN scales queries and keys alike.
        scale = widths.query**-0.5 * _yarn_scale(fields) ** 2
        return {
            "num_kv_heads": 1,
            "head_dim": widths.cached,
            "rope": (rope, length),
            "kv": {"value_width": widths.rank},
            "latent": LatentSpec(widths, scale, fields.flag("attention_bias", False)),
        }

    def read_indexed(self, fields: Fields, max_length: int) -> dict[str, Any]:
        """Returns what `read` does where an indexer chooses what a query attends to.

        A query attends to the `index_topk` positions that the indexer rates highest, which are all
        of them up to that length. So a sequence may be as long as that, and the indexer is not
        read. `q_lora_rank` may not be null: the indexer's queries are made of this latent.
        """
        fields.only(rope_interleave=True, scoring_func="sigmoid", topk_method="noaux_tc")
        fields.only(num_experts=fields.integer("n_routed_experts", 256))
        fields.integer("q_lora_rank", self.query_rank)
        kind = "indexed_attention"
        fields.layer_types([kind] * fields.integer("num_hidden_layers"), kinds=(kind,))
        arguments = replace(self, has_indexer=False).read(fields, max_length)
        rope, length = arguments["rope"]
        rope = replace(rope, interleaved=True)  # also where the field is null
        return {**arguments, "rope": (rope, min(length, fields.integer("index_topk", 2048)))}


def _read_share(fields: Fields, widths: LatentWidths, max_length: int) -> tuple[Rope, int]:
    """Returns the rotation; `partial_rotary_factor` must agree with the widths of the head."""
    share = widths.rotated / widths.query
    rope, length = fields.rope(widths.query, max_length, partial=share)
    if 2 * len(rope.frequencies) != widths.rotated:
        text = f"partial_rotary_factor must be {share} where qk_rope_head_dim = {widths.rotated}"
        fields.note_wrong(text, **NO_ROPE)
    return rope, length


def _yarn_scale(fields: Fields) -> float:
    """Returns the root of the factor of scores that YaRN's `mscale_all_dim` adds."""
    parameters = fields.get("rope_scaling", None) or fields.get("rope_parameters", None) or {}
    factor = parameters.get("factor", 1.0)
    share = parameters.get("mscale_all_dim") or 0.0
    for name, value in (("factor", factor), ("mscale_all_dim", share)):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e30:
            text = f"rope {name} must be a positive number, not {value!r}"
            fields.note_wrong(text, **NO_ROPE)
            return 1.0
    if (
        parameters.get("rope_type", parameters.get("type", "default")) == "default"
        or not share
        or factor <= 1
    ):
        return 1.0
    return 0.1 * share * math.log(factor) + 1.0


def latent_attention(
    config: DecoderConfig,
    latent: LatentSpec,
    index: int,
    at: Scope,
    *,
    temperature_tuning: tuple[float, int, int] | None = None,
) -> LatentAttention:
    """Returns attention to latents, which all heads share.

    Args:
        config: The config of the model.
        latent: The latent attention.
        index: The number of the layer.
        at: The scope of the attention.
        temperature_tuning: See `Scores`.
    """
    width = config.hidden_size
    num_heads = config.num_query_heads
    widths = latent.widths

    def norm(rank: int, module: str) -> RMSNorm:
        name = (at / module).name
        return RMSNorm(rank, name=name, epsilon=NORM_EPSILON, axis=None, dtype=at.dtype)

    query_rows = num_heads * widths.query
    queries: Linear | LatentQueries
    if widths.query_rank is None:
        queries = at.projection(width, ("q_proj", query_rows))
    else:
        rank = widths.query_rank
        queries = LatentQueries(
            at.projection(width, ("q_a_proj", rank), axes=("embed", None), bias=latent.bias),
            norm(rank, "q_a_layernorm"),
            at.projection(rank, ("q_b_proj", query_rows), axes=(None, "heads")),
        )
    expand_rows = num_heads * (widths.plain + widths.value)
    expand = at.projection(widths.rank, ("kv_b_proj", expand_rows), axes=(None, "heads"))
    reduced = "kv_a_proj_with_mqa", widths.cached
    values = num_heads * widths.value
    projections = LatentProjections(
        queries,
        at.projection(width, reduced, axes=("embed", None), bias=latent.bias),
        norm(widths.rank, "kv_a_layernorm"),
        # Its weight goes into queries and outputs (absorption), and no input is multiplied by it.
        Linear(replace(expand.spec, multiplied=False)),
        at.projection(values, ("o_proj", width), axes=("heads", "embed"), bias=latent.bias),
    )
    return LatentAttention(
        index,
        projections,
        widths,
        num_heads=num_heads,
        rope=config.rope_of(index),
        scores=Scores(scale=latent.scale, temperature_tuning=temperature_tuning),
    )
