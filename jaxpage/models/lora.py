"""Which modules of a model take LoRA adapters, and under which names: every linear layer, by its name in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import jax.numpy as jnp
from flax import nnx

from jaxpage.layers.linear import Linear
from jaxpage.layers.sharding import Sharding
from jaxpage.models.base import Family, ModelSpec, abstract_model, make_model
from jaxpage.models.replacing import Path, Rule, replace_modules
from jaxpage.models.sharding import ShardedWeight, sharded_weights, with_sharding
from jaxpage.models.weights import Weight


@dataclass(frozen=True)
class LoRASpec:
    """num_slots: adapters at once on the device. rank: the largest, to which the others are padded. targets: by name of the module."""

    num_slots: int
    rank: int
    targets: Mapping[str, LoRATarget]

    def rule(self, rule: Rule | None) -> Rule:
        """Besides what another rule replaces, every linear layer takes adapters."""

        def both(path: Path, module: nnx.Module) -> nnx.Module | None:
            replacement = (rule and rule(path, module)) or module
            if not isinstance(replacement, Linear) or not replacement.spec.multiplied:
                return None if replacement is module else replacement
            replacement.add_lora(self.num_slots, self.rank)
            return replacement

        return both

    def num_bytes(self, dtype: str) -> int:
        """Of the adapters of all slots, in a model of this type."""
        layers = {target.path: target for target in self.targets.values()}.values()
        numbers = sum(
            layer.num_layer_parts * layer.num_in + layer.num_layer_rows for layer in layers
        )
        return self.num_slots * self.rank * numbers * jnp.dtype(dtype).itemsize


@dataclass(frozen=True)
class LoRATarget:
    """Rows of a linear layer that are a module of the checkpoint.

    path: of the layer. parts: of its products, those that the module is. first_row: of the module in the layer.
    num_layer_parts, num_layer_rows: of the whole layer.
    """

    path: Path
    parts: range
    first_row: int
    num_rows: int
    num_in: int
    num_layer_parts: int
    num_layer_rows: int


def adapter_weights(
    family: Family, spec: ModelSpec, lora: LoRASpec, rule: Rule | None, sharding: Sharding
) -> list[ShardedWeight]:
    """A and B of every linear layer, for all slots, and the parameters that have parts of them. rule: the model's own."""
    rule = lora.rule(rule)
    state = nnx.to_flat_state(nnx.state(make_model(family, spec, "float32", rule)))
    weights = [
        Weight(cast(Path, path), variable.get_value().shape, variable.get_metadata()["axes"], ())
        for path, variable in state
        if "lora" in path
    ]
    _, shapes = abstract_model(family, spec, "float32", with_sharding(sharding, rule))
    return sharded_weights(weights, shapes, sharding)


def lora_targets(family: Family, spec: ModelSpec) -> dict[str, LoRATarget]:
    """By the name of the module, with the family's prefix and without it."""
    targets: dict[str, LoRATarget] = {}

    def note(path: Path, module: nnx.Module) -> None:
        if not isinstance(module, Linear) or not module.spec.multiplied:
            return
        of, first = module.spec, 0
        whole = (of.num_in, len(of.parts), of.num_out)
        for index, part in enumerate(of.parts):
            if part.name is not None:
                targets[part.name] = LoRATarget(
                    path, range(index, index + 1), first, part.rows, *whole
                )
            first += part.rows
        if of.fused:
            targets[of.fused] = LoRATarget(path, range(len(of.parts)), 0, of.num_out, *whole)

    replace_modules(make_model(family, spec, "float32", None), note)
    return {name.removeprefix(family.prefix): target for name, target in targets.items()} | targets
