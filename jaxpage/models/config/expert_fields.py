"""Reads what configs say of experts, and which layers have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpage.layers import ExpertsSpec
from jaxpage.layers.routing import Groups, Routing
from jaxpage.models.config.fields import Fields

_ONE_GROUP = {"n_group": 1, "topk_group": 1}


@dataclass(frozen=True, kw_only=True)
class ExpertDefaults:
    """Says which fields of experts a family has, and what is in the place of absent ones.

    A pair is a field and its default.

    Attributes:
        count_field: The field of the number of experts.
        count: Its default.
        per_token: In the place of `num_experts_per_tok`.
        width_field: The field of the inner width of an expert.
        width: Its default; REQUIRED if it has none.
        normalized: True if the weights of a token's experts add up to one, or the pair that says
            so.
        shared_count: The number of experts that all tokens take, each as wide as the others; None
            for a family without them.
        shared_width: The width of the one expert that all tokens take; None like `shared_count`.
        groups: In the place of `n_group` and `topk_group`; None for a family without groups.
        factor: The factor of the weights; None for a family that has no field for it.
        routing: The fields of `Routing` that are the same in all models of the family.
        num_dense: The number of the first layers, which have no experts. The field may be "".
        has_step: True if `decoder_sparse_step` and `mlp_only_layers` say which layers have experts.
        has_types: True if `mlp_layer_types` may say it.
    """

    count_field: str = "num_experts"
    count: Any  # these three: an int, or REQUIRED
    per_token: Any
    width_field: str = "moe_intermediate_size"
    width: Any
    normalized: tuple[str, bool] | bool = ("norm_topk_prob", False)
    shared_count: tuple[str, Any] | None = None
    shared_width: tuple[str, Any] | None = None
    groups: tuple[int, int] | None = None
    factor: tuple[str, float] | None = None
    routing: Mapping[str, Any] = field(default_factory=dict)
    num_dense: tuple[str, int] = ("", 0)
    has_step: bool = False
    has_types: bool = False

    def read(
        self, fields: Fields, *, routing: Mapping[str, Any] | None = None, **more: Any
    ) -> ExpertsSpec:
        """Returns what the fields say of the experts.

        Args:
            fields: The fields of the config.
            routing: Further fields of `Routing`.
            **more: Further fields of `ExpertsSpec`, or others than those that are read.
        """
        count = (self.count_field, self.count)
        width = fields.integer(self.width_field, self.width)
        choice = {**self.routing, **(routing or {})}
        if self.groups is not None:
            # DeepSeek-V3 and its successors rate a group by the sum of its two best experts.
            choice["groups"] = read_groups(
                fields, count, best=2, default=self.groups, per_token=self.per_token
            )
        if self.factor is not None:
            choice["factor"] = fields.number(*self.factor)
        if self.shared_count is not None:
            more.setdefault("shared_width", width * fields.integer(*self.shared_count))
        if self.shared_width is not None:
            more.setdefault("shared_width", fields.integer(*self.shared_width))
        usual = self.normalized
        chosen = Routing(
            num_experts=fields.integer(*count),
            per_token=fields.integer("num_experts_per_tok", self.per_token),
            normalized=fields.flag(*usual) if isinstance(usual, tuple) else usual,
            **choice,
        )
        if chosen.per_token > chosen.num_experts:
            text = (
                f"num_experts_per_tok = {chosen.per_token} of {count[0]} = {chosen.num_experts} "
                "experts cannot be"
            )
            fields.note_wrong(text, **{"num_experts_per_tok": 1, count[0]: chosen.num_experts})
        return ExpertsSpec(chosen, width, **more)

    def read_layers(self, fields: Fields) -> tuple[bool, ...]:
        """Returns for each layer whether it has experts."""
        if self.has_step:
            return _read_step(fields)
        name, default = self.num_dense
        num_dense = fields.integer(name, default, minimum=0) if name else default
        layers = range(fields.integer("num_hidden_layers"))
        usual = tuple(index >= num_dense for index in layers)
        return sparse_by_type(fields, usual) if self.has_types else usual


# DeepSeek-V3 began with it: scores are sigmoids, and ratings have corrections.
CORRECTED = ExpertDefaults(
    count_field="n_routed_experts",
    count=256,
    per_token=8,
    width=2048,
    normalized=("norm_topk_prob", True),
    shared_count=("n_shared_experts", 1),
    groups=(1, 1),
    factor=("routed_scaling_factor", 1.0),
    routing={"sigmoid": True, "corrected": True},
)


def _read_step(fields: Fields) -> tuple[bool, ...]:
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
        fields.note_wrong(text, **_ONE_GROUP)
        number = num_kept = 1
    per_token = fields.integer("num_experts_per_tok", per_token)
    if per_token > num_experts // number * num_kept:
        text = (
            f"topk_group = {num_kept} of n_group = {number} have fewer than "
            f"num_experts_per_tok = {per_token} experts"
        )
        fields.note_wrong(text, **_ONE_GROUP, num_experts_per_tok=1)
    return Groups(number, num_kept, best) if num_kept < number else None
