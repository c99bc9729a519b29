"""DeepSeek-V3 and R1 (DeepSeek-AI, 2024) have latent attention, and experts in groups.

The scores of experts are sigmoids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.layers.experts import ExpertsSpec
from jaxpage.layers.rope import Rope
from jaxpage.layers.routing import Groups
from jaxpage.models import rotary_decoder
from jaxpage.models.config_fields import WrongField
from jaxpage.models.experts import DEEPSEEK_NAMES, read_experts
from jaxpage.models.fields import Fields
from jaxpage.models.latent import LatentSpec, read_latent
from jaxpage.models.mtp_names import read_numbered_names
from jaxpage.models.rotary_decoder import RotaryDecoder, RotaryDecoderSpec, prefix

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
# The MTP head of published files, where config.json does not count it.
ignored = (*rotary_decoder.ignored, "*layers.61.*")
ONE_GROUP = {"n_group": 1, "topk_group": 1}
ALIASES = {
    "n_routed_experts": "num_local_experts",
    "num_nextn_predict_layers": "num_mtp_layers",
}


class Spec(RotaryDecoderSpec):
    """Reads transformers' `DeepseekV3Config`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "deepseek_v3", ALIASES) as fields:
            return cls._from_fields(
                fields,
                experts=read_corrected_experts(
                    fields, count=256, per_token=8, width=2048, groups=(8, 4), factor=2.5
                ),
                expert_names=DEEPSEEK_NAMES,
                sparse_layers=first_dense(fields, 3),
                draft_heads=read_numbered_names(fields),
                **latent_knobs(fields, longest=4096, query_rank=1536),
            )


def first_dense(
    fields: Fields, default: int, field: str = "first_k_dense_replace"
) -> tuple[bool, ...]:
    """Returns which layers have experts: all but the first ones, whose number is in `field`."""
    first = fields.integer(field, default, least=0)
    return tuple(index >= first for index in range(fields.integer("num_hidden_layers")))


def sparse_by_type(fields: Fields, usual: tuple[bool, ...]) -> tuple[bool, ...]:
    """Returns which layers have experts, by `mlp_layer_types`; `usual` if there is none."""
    types = fields.get("mlp_layer_types", None)
    if types is None:
        return usual
    fits = isinstance(types, list) and len(types) == len(usual)
    if fits and all(kind in ("dense", "sparse") for kind in types):
        return tuple(kind == "sparse" for kind in types)
    text = (
        f"mlp_layer_types must say dense or sparse for each of {len(usual)} layers, not {types!r}"
    )
    fields.note(WrongField(text), mlp_layer_types=None, num_hidden_layers=len(usual))
    return usual


def read_corrected_experts(
    fields: Fields,
    *,
    count: Any,
    per_token: Any,
    width: int,
    groups: tuple[int, int],
    factor: float,
    normalized: bool = True,
    shared: Any = 1,
    count_field: str = "n_routed_experts",
    shared_field: str | None = "n_shared_experts",
    **routing: Any,
) -> ExpertsSpec:
    """Returns the experts of a family whose scores are sigmoids with corrections by default.

    `count_field` and `shared_field` name the fields with the numbers of experts and of shared ones;
    `shared_field` is None if there are no shared experts. `routing` has fields of `Routing` that
    differ. The other arguments are the family's defaults of fields.
    """
    named_count = (count_field, count)
    named_width = ("moe_intermediate_size", width)
    return read_experts(
        fields,
        count=named_count,
        per_token=per_token,
        width=named_width,
        normalized=fields.flag("norm_topk_prob", normalized),
        routing={
            "sigmoid": True,
            "corrected": True,
            "groups": read_groups(fields, named_count, best=2, default=groups, per_token=per_token),
            "factor": fields.number("routed_scaling_factor", factor),
            **routing,
        },
        shared_width=shared_field
        and fields.integer(*named_width) * fields.integer(shared_field, shared),
    )


def read_groups(
    fields: Fields,
    count: tuple[str, Any],
    *,
    best: int,
    default: Any = (None, None),
    per_token: Any = 1,
) -> Groups | None:
    """Returns the groups of experts; None if all experts are one group.

    Args:
        fields: The fields of the config.
        count: The field of the number of experts, and its default.
        best: The number of experts that rate a group; see `Groups`.
        default: The defaults of `n_group` and `topk_group`.
        per_token: The default of the number of experts of a token.
    """
    number = fields.optional_integer("n_group", default[0]) or 1
    num_kept = fields.optional_integer("topk_group", default[1]) or 1
    num_experts = fields.integer(*count)
    if num_experts % number or num_kept > number or (number > 1 and num_experts // number < best):
        error = WrongField(
            f"{num_experts} experts cannot be in n_group = {number} groups, of which topk_group = {num_kept} are taken"
        )
        fields.note(error, **ONE_GROUP)
        number = num_kept = 1
    per_token = fields.integer("num_experts_per_tok", per_token)
    if per_token > num_experts // number * num_kept:
        error = WrongField(
            f"topk_group = {num_kept} of n_group = {number} have fewer than num_experts_per_tok = {per_token} experts"
        )
        fields.note(error, **ONE_GROUP, num_experts_per_tok=1)
    return Groups(number, num_kept, best) if num_kept < number else None


def latent_knobs(fields: Fields, **defaults: Any) -> dict[str, Any]:
    """Returns arguments of `RotaryDecoderSpec._from_fields`; see `read_latent` for the defaults."""
    fields.only(moe_layer_freq=1, ep_size=1)
    return knobs_of(*read_latent(fields, **defaults))


def knobs_of(latent: LatentSpec, rope: Rope, length: int) -> dict[str, Any]:
    """Returns arguments of `RotaryDecoderSpec._from_fields` for what `read_latent` returns."""
    return {
        "latent": latent,
        "num_kv_heads": 1,
        "head_dim": latent.widths.kept,
        "value_width": latent.widths.rank,
        "max_position_embeddings": length,
        "rope": (rope, length),
    }
