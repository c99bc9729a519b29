"""Where the experts of a layer stand in a checkpoint: apart, as they are published, or stacked, as transformers keeps them in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.typing import DTypeLike

from jaxpage.errors import CheckpointError
from jaxpage.layers.experts import Experts, ExpertsSpec, MixtureOfExperts
from jaxpage.layers.mlp import GatedMLP
from jaxpage.layers.parameter import Source, concatenate, stack, tensor
from jaxpage.models.fields import Fields


@dataclass(frozen=True)
class ExpertNames:
    """In files. module: of the mixture, in its layer. gate, up, down: of an expert's weights."""

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


PLAIN_NAMES = ExpertNames()


def read_experts(
    fields: Fields,
    *,
    count: tuple[str, int],
    per_token: int,
    width: tuple[str, int],
    normalized: bool | None,
    **more: Any,
) -> ExpertsSpec:
    """count, width: names of fields, and their defaults. normalized: None is what `norm_topk_prob` says."""
    spec = ExpertsSpec(
        num_experts=fields.integer(*count),
        per_token=fields.integer("num_experts_per_tok", per_token),
        width=fields.integer(*width),
        normalized=fields.flag("norm_topk_prob", False) if normalized is None else normalized,
        **more,
    )
    if spec.per_token > spec.num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok = {spec.per_token} of {count[0]} = {spec.num_experts} experts cannot be"
        )
    return spec


def sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Qwen's rule: each layer whose number, from 1, divides by `decoder_sparse_step`, but those of `mlp_only_layers`."""
    every, dense = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers", None) or []
    if not isinstance(dense, list):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list, not {dense!r}")
    num_layers = fields.integer("num_hidden_layers")
    return tuple((index + 1) % every == 0 and index not in dense for index in range(num_layers))


def make_experts(
    spec: ExpertsSpec,
    model_width: int,
    names: ExpertNames,
    *,
    layer: str,
    activation: str,
    shared: tuple[GatedMLP, str] | None,
    dtype: DTypeLike,
) -> MixtureOfExperts:
    """layer: its name in the checkpoint."""
    published, in_memory, inner = f"{layer}.{names.module}", f"{layer}.mlp", spec.width

    def one(expert: int, part: str, *shape: int) -> Source:
        return tensor(f"{published}.experts.{expert}.{part}.weight", *shape)

    every = range(spec.num_experts)
    halves = [[one(expert, part, inner, model_width) for part in (names.gate, names.up)] for expert in every]
    downs = [one(expert, names.down, model_width, inner) for expert in every]
    experts = Experts(
        spec,
        model_width,
        gate_up=[
            stack([concatenate(pair) for pair in halves]),
            tensor(f"{in_memory}.experts.gate_up_proj", spec.num_experts, 2 * inner, model_width),
        ],
        down=[stack(downs), tensor(f"{in_memory}.experts.down_proj", spec.num_experts, model_width, inner)],
        dtype=dtype,
    )
    return MixtureOfExperts(
        spec,
        model_width,
        experts,
        router=f"{published}.gate.weight",
        router_aliases=(f"{in_memory}.gate.weight",) if published != in_memory else (),
        activation=activation,
        shared=shared,
        dtype=dtype,
    )
