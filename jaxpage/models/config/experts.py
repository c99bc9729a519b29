"""Reads what configs say of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.layers.experts import ExpertsSpec
from jaxpage.layers.routing import Routing
from jaxpage.models.config.config_fields import WrongField
from jaxpage.models.config.fields import REQUIRED, Fields


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
        error = WrongField(
            f"num_experts_per_tok = {chosen.per_token} of {count[0]} = {chosen.num_experts} experts cannot be"
        )
        fields.note(error, **{"num_experts_per_tok": 1, count[0]: chosen.num_experts})
    return ExpertsSpec(chosen, fields.integer(*width), **more)


def sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Returns which layers have experts, by Qwen's rule.

    They are those whose number, from 1, `decoder_sparse_step` divides, except for those in
    `mlp_only_layers`.
    """
    every = fields.integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers", None) or []
    if not isinstance(dense, list):
        fields.note(
            WrongField(f"mlp_only_layers must be a list, not {dense!r}"), mlp_only_layers=None
        )
        dense = []
    num_layers = fields.integer("num_hidden_layers")
    return tuple((index + 1) % every == 0 and index not in dense for index in range(num_layers))
