"""Finds the linear layers of a model, which take LoRA adapters by their names in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import jax.numpy as jnp
from flax import nnx

from jaxpage.layers import Linear
from jaxpage.layers.sharding import Sharding
from jaxpage.models.base import Family, ModelSpec, abstract_model, make_model, other_names
from jaxpage.models.parameters.replacing import Path, Rule, replace_modules
from jaxpage.models.parameters.weights import Weight
from jaxpage.models.sharding.dividing import ShardedWeight, shard_weights, with_sharding


@dataclass(frozen=True)
class LoRASpec:
    """Describes the slots for adapters on the device.

    Attributes:
        num_slots: The number of adapters on the device at a time.
        rank: The largest rank, to which the others are padded.
        targets: The rows of linear layers, by the name of their module.
    """

    num_slots: int
    rank: int
    targets: Mapping[str, LoRATarget]

    def rule(self, rule: Rule | None) -> Rule:
        """Returns a rule that adds adapters to every linear layer.

        The given rule is applied first.
        """

        def both(path: Path, module: nnx.Module) -> nnx.Module | None:
            replacement = (rule and rule(path, module)) or module
            if not isinstance(replacement, Linear) or not replacement.spec.takes_adapters:
                return None if replacement is module else replacement
            replacement.add_lora(self.num_slots, self.rank)
            return replacement

        return both

    def num_bytes(self, dtype: str) -> int:
        """Returns the bytes of the adapters of all slots, in a model of this type."""
        # Several targets may be parts of one layer, whose slots count once.
        layers = {target.path: target for target in self.targets.values()}.values()
        numbers = sum(
            layer.num_layer_parts * layer.num_in + layer.num_layer_rows for layer in layers
        )
        return self.num_slots * self.rank * numbers * jnp.dtype(dtype).itemsize


@dataclass(frozen=True)
class LoRATarget:
    """Describes rows of a linear layer that are a module of the checkpoint.

    Attributes:
        path: The path of the layer.
        parts: The products of the layer that the module has.
        first_row: The first row of the module in the layer.
        num_rows: The number of rows of the module.
        num_in: The number of inputs.
        num_layer_parts: The number of products of the whole layer.
        num_layer_rows: The number of rows of the whole layer.
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
    """Returns A and B of every linear layer, and the parameters that have parts of them.

    They have room for the adapters of all slots.

    Args:
        family: The model's family.
        spec: The spec of the model.
        lora: The slots for adapters.
        rule: The model's own rule; see `make_model`.
        sharding: The sharding of the model.
    """
    rule = lora.rule(rule)
    state = nnx.to_flat_state(nnx.state(make_model(family, spec, "float32", rule)))
    weights = [
        Weight(cast(Path, path), variable.get_value().shape, variable.get_metadata()["axes"], ())
        for path, variable in state
        if "lora" in path
    ]
    _, shapes = abstract_model(family, spec, "float32", with_sharding(sharding, rule))
    return shard_weights(weights, shapes, sharding)


def lora_targets(family: Family, spec: ModelSpec) -> dict[str, LoRATarget]:
    """Returns the targets by the names that their modules may have in a checkpoint."""
    targets: dict[str, LoRATarget] = {}

    def note(path: Path, module: nnx.Module) -> None:
        if not isinstance(module, Linear) or not module.spec.takes_adapters:
            return
        spec = module.spec
        first = 0
        whole = (spec.num_in, len(spec.parts), spec.num_out)
        for index, part in enumerate(spec.parts):
            if part.name is not None:
                targets[part.name] = LoRATarget(
                    path, range(index, index + 1), first, part.rows, *whole
                )
            first += part.rows
        if spec.fused:
            targets[spec.fused] = LoRATarget(path, range(len(spec.parts)), 0, spec.num_out, *whole)

    replace_modules(make_model(family, spec, "float32", None), note)
    others = {
        other: target for name, target in targets.items() for other in other_names(family, name)
    }
    # A name of a module wins over the same name of another module in other checkpoints.
    return others | targets
