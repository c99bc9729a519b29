"""Reads what configs say of experts, and which layers have them.

DeepSeek-V3 began with experts whose scores are sigmoids with corrections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.layers import ExpertsSpec
from jaxpage.layers.routing import Groups, Routing
from jaxpage.models.config.fields import REQUIRED, Fields

ONE_GROUP = {"n_group": 1, "topk_group": 1}


def read_experts(
    fields: Fields,
    *,
    count: tuple[str, Any],
    per_token: Any,
    width: tuple[str, Any],
    normalized: bool | None,
    routing: Mapping[str, Any] | None = None,
    **more: Any,
) -> ExpertsSpec:
    """Reads what a config says of experts.

    Args:
        fields: The fields of the config.
        count: The field of the number of experts, and its default.
        per_token: The default of the number of experts of a token; None if the field is required.
        width: The field of the inner width of an expert, and its default.
        normalized: True if the weights add up to one; None to read `norm_topk_prob`.
        routing: Further fields of `Routing`.
        **more: Further fields of `ExpertsSpec`.
    """
    chosen = Routing(
        num_experts=fields.integer(*count),
        per_token=fields.integer(
            "num_experts_per_tok", REQUIRED if per_token is None else per_token
        ),
        normalized=fields.flag("norm_topk_prob", False) if normalized is None else normalized,
        **(routing or {}),
    )
    if chosen.per_token > chosen.num_experts:
        text = (
            f"num_experts_per_tok = {chosen.per_token} of {count[0]} = {chosen.num_experts} "
            "experts cannot be"
        )
        fields.note_wrong(text, **{"num_experts_per_tok": 1, count[0]: chosen.num_experts})
    return ExpertsSpec(chosen, fields.integer(*width), **more)


def sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Returns which layers have experts, by Qwen's rule.

    They are those whose number, from 1, `decoder_sparse_step` divides, except for those in
    `mlp_only_layers`.
    """
    every = fields.integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers", None) or []
    if not isinstance(dense, list):
        fields.note_wrong(f"mlp_only_layers must be a list, not {dense!r}", mlp_only_layers=None)
        dense = []
    num_layers = fields.integer("num_hidden_layers")
    return tuple((index + 1) % every == 0 and index not in dense for index in range(num_layers))


def first_dense(
    fields: Fields, default: int, field: str = "first_k_dense_replace"
) -> tuple[bool, ...]:
    """Returns which layers have experts: all but the first ones, whose number is in `field`."""
    first = fields.integer(field, default, minimum=0)
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
    fields.note_wrong(text, mlp_layer_types=None, num_hidden_layers=len(usual))
    return usual


def read_corrected_experts(
    fields: Fields,
    *,
    count: Any,
    per_token: Any,
    width: int,
    groups: tuple[int, int] = (1, 1),
    factor: float = 1.0,
    normalized: bool = True,
    shared: tuple[str, Any] | None = ("n_shared_experts", 1),
    count_field: str = "n_routed_experts",
    more: Mapping[str, Any] | None = None,
    **routing: Any,
) -> ExpertsSpec:
    """Returns the experts of a family whose scores are sigmoids with corrections by default.

    `count_field` names the field with the number of experts; `shared` is the field with that of
    shared ones, and its default, or None if there are none. `more` has further fields of
    `ExpertsSpec`, `routing` fields of `Routing` that differ. The other arguments are the family's
    defaults of fields.
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
        **{
            "shared_width": shared and fields.integer(*named_width) * fields.integer(*shared),
            **(more or {}),
        },
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
        text = (
            f"{num_experts} experts cannot be in n_group = {number} groups, of which "
            f"topk_group = {num_kept} are taken"
        )
        fields.note_wrong(text, **ONE_GROUP)
        number = num_kept = 1
    per_token = fields.integer("num_experts_per_tok", per_token)
    if per_token > num_experts // number * num_kept:
        text = (
            f"topk_group = {num_kept} of n_group = {number} have fewer than "
            f"num_experts_per_tok = {per_token} experts"
        )
        fields.note_wrong(text, **ONE_GROUP, num_experts_per_tok=1)
    return Groups(number, num_kept, best) if num_kept < number else None
