"""Shards the layers of a model over devices, and its weights by the axes that they declare."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from jaxpage.errors import ConfigError, UnsupportedError
from jaxpage.layers.sharded import find_sharded_kind
from jaxpage.layers.sharding import Sharding, parts_of
from jaxpage.models.base import Family, KVSpec, ModelSpec, make_model, other_names
from jaxpage.models.parameters.replacing import Path, Rule, replace_modules
from jaxpage.models.parameters.weights import Weight, weights_of

# The number of shards (C) where sums do not depend on the number of devices. It allows 1, 2 and 4
# devices (docs/scale.md).
LOGICAL_SHARDS = 4


def make_sharding(spec: ModelSpec, num_devices: int, *, invariant: bool) -> Sharding:
    """Returns the sharding of a model over devices.

    Raises:
        ConfigError: The devices cannot share the heads.
    """
    num_query_heads = spec.num_query_heads
    num_kv_heads = spec.kv.num_kv_heads
    if len({count for count, _ in spec.kv.heads}) > 1:
        if num_devices == 1:
            return Sharding(num_kv_heads)
        raise ConfigError(
            f"{num_devices} devices cannot share a model whose layers have different numbers of "
            "key/value heads; use one"
        )
    if num_query_heads % num_devices:
        raise ConfigError(
            f"{num_devices} devices cannot share {num_query_heads} query heads evenly"
        )
    if not _goes_into(num_kv_heads, num_devices):
        raise ConfigError(
            f"{num_devices} devices cannot share {num_kv_heads} key/value heads evenly"
        )
    if not invariant:
        return Sharding(num_kv_heads, num_devices, num_devices)
    fitting = (
        count
        for count in range(LOGICAL_SHARDS, 0, -1)
        if LOGICAL_SHARDS % count == 0
        and num_query_heads % count == 0
        and _goes_into(num_kv_heads, count)
    )
    num_shards = next(fitting)
    if num_shards % num_devices:
        raise ConfigError(
            f"tensor_parallel_reduction 'invariant' adds up {num_shards} parts of this "
            f"model, which {num_devices} devices cannot "
            "share evenly; use 'fast'"
        )
    return Sharding(num_kv_heads, num_devices, num_shards, invariant=True)


def kv_of_shard(kv: KVSpec, sharding: Sharding) -> KVSpec:
    """Returns what a shard keeps: keys and values of its heads, its part of recurrent states."""
    if not sharding.is_divided:
        return kv
    count = sharding.num_shards
    states = tuple(
        state
        and replace(
            state,
            # A convolution alone has a width but no shape.
            shape=state.shape and (state.shape[0] // count, *state.shape[1:]),
            input_width=state.input_width // count,
        )
        for state in kv.states
    )
    kv_heads = sharding.kv_heads_of_shard
    heads = tuple((kv_heads, width) for _, width in kv.heads)
    return replace(kv, num_kv_heads=kv_heads, states=states, heads=heads)


def _goes_into(num_kv_heads: int, count: int) -> bool:
    # With fewer heads than shards, several shards have a copy of the same head.
    return num_kv_heads % count == 0 or count % num_kv_heads == 0


def with_sharding(sharding: Sharding, rule: Rule | None) -> Rule | None:
    """Returns the rule that puts sharded layers in the place of others.

    Args:
        sharding: The sharding.
        rule: The model's own rule; its layers are sharded too.
    """
    if not sharding.is_divided:
        return rule

    def shard(path: Path, module: nnx.Module) -> nnx.Module | None:
        make = find_sharded_kind(module, sharding.num_devices)
        if rule is None:
            return make and make(module, sharding)
        replacement = rule(path, module)
        if make is None:
            return replacement
        replace_modules(module, rule, path)
        return make(replacement or module, sharding)

    return shard


@dataclass(frozen=True)
class Place:
    """Describes a parameter of a sharded model.

    Attributes:
        path: The path of the parameter.
        index: The place of its shard among the shards of a device.
        shape: The shape in one shard.
    """

    path: Path
    index: int
    shape: tuple[int, ...]


Box = tuple[slice, ...]


@dataclass(frozen=True)
class ShardedWeight:
    """Holds a weight of the checkpoint, and the parameters that have parts of it.

    Attributes:
        weight: The weight.
        places: The parameters that have parts of it.
        axis: The axis that is sharded; None if each parameter has the whole weight.
        sharding: The sharding.
    """

    weight: Weight
    places: tuple[Place, ...]
    axis: int | None
    sharding: Sharding

    def boxes(self, place: Place, device: int) -> list[Box]:
        """Returns the parts of the weight that this parameter has on that device.

        The parts come one after the other along the axis.
        """
        whole = tuple(slice(0, size) for size in self.weight.shape)
        if self.axis is None:
            return [whole]
        boxes = []
        start = 0
        for name, size in _parts(self.weight, self.axis):
            number = device * (self.sharding.count(name) // self.sharding.num_devices) + place.index
            part = self.sharding.part(name, size, number)
            along = slice(start + part.start, start + part.stop)
            boxes.append((*whole[: self.axis], along, *whole[self.axis + 1 :]))
            start += size
        return boxes

    def part(self, whole: np.ndarray, place: Place, device: int) -> np.ndarray:
        """Returns the numbers of the weight that this parameter has on that device."""
        parts = [whole[box] for box in self.boxes(place, device)]
        return parts[0] if self.axis is None else np.concatenate(parts, axis=self.axis)

    def fill(self, whole: np.ndarray, place: Place, array: np.ndarray) -> None:
        """Puts this parameter's numbers, from all devices, in their places in the whole weight."""
        assert self.axis is not None
        for device, of_device in enumerate(np.split(array, self.sharding.num_devices)):
            start = 0
            for box in self.boxes(place, device):
                size = box[self.axis].stop - box[self.axis].start
                along = slice(start, start + size)
                whole[box] = of_device[(*(slice(None),) * self.axis, along)]
                start += size


class ShardingChecker:
    """Checks shardings of a model, which is built once. Layers that are equal are sharded once.

    Attributes:
        weights: The model's own weights.
    """

    def __init__(self, family: Family, spec: ModelSpec, rule: Rule | None):
        """Builds the model.

        Args:
            family: The model's family.
            spec: The spec of the model.
            rule: The model's own rule; see `make_model`.
        """
        layers: dict[Path, tuple[nnx.Module, nnx.Module]] = {}

        def note(path: Path, module: nnx.Module) -> nnx.Module | None:
            replacement = None if rule is None else rule(path, module)
            # A layer that two devices can share has a sharded kind for any number of devices.
            if _inside(path, layers) is None and find_sharded_kind(module, 2):
                layers[path] = module, replacement or module
            return replacement

        model = make_model(family, spec, "float32", note)
        self.weights = weights_of(model, functools.partial(other_names, family, spec=spec))
        layer_of = [_inside(weight.path, layers) for weight in self.weights]
        shapes: dict[Path, list[Any]] = {path: [] for path in layers}
        for weight, layer in zip(self.weights, layer_of, strict=True):
            if layer is not None:
                shapes[layer].append((weight.path[len(layer) :], weight.shape, weight.axes))
        kinds: dict[Any, Path] = {}  # the first layer of each kind
        for path, modules in layers.items():
            kinds.setdefault((*map(type, modules), *shapes[path]), path)
        self._layers = {path: layers[path] for path in kinds.values()}
        self._possible: set[Sharding] = set()  # a plan asks again for each type and cache
        self._to_check = [
            weight
            for weight, layer in zip(self.weights, layer_of, strict=True)
            if layer is None or layer in self._layers
        ]

    def check(self, sharding: Sharding) -> None:
        """Refuses a model that cannot be sharded in this way.

        Raises:
            ConfigError: An axis cannot be sharded evenly.
            UnsupportedError: A layer has heads, and this version does not shard it.
        """
        if not sharding.is_divided or sharding in self._possible:
            return
        sharded = set()
        for path, (module, module_state) in self._layers.items():
            if make := find_sharded_kind(module, sharding.num_devices):
                state = nnx.to_flat_state(nnx.state(make(module_state, sharding)))
                problems = [
                    _in_whole((*path, *cast(Path, path_in_module))) for path_in_module, _ in state
                ]
                sharded |= {whole for whole, shard in problems if shard is not None}
        for weight in self._to_check:
            if weight.path not in sharded:
                _refuse_heads(weight)
        self._possible.add(sharding)


def shard_weights(
    weights: Iterable[Weight], shapes: Mapping[Any, Any], sharding: Sharding
) -> list[ShardedWeight]:
    """Returns the weights, each with the parameters that have parts of it.

    Args:
        weights: The weights of the checkpoint.
        shapes: The shapes of the sharded model's parameters on one device; see
            `models.base.abstract_model`.
        sharding: The sharding.

    Raises:
        UnsupportedError: A layer has heads, and `with_sharding` does not shard it.
    """
    places: dict[Path, list[Place]] = {}
    for keys, struct in jax.tree_util.tree_leaves_with_path(shapes):
        path = tuple(key.key for key in keys)
        whole, shard = _in_whole(path)
        places.setdefault(whole, []).append(Place(path, shard or 0, struct.shape))
    weights_with_parts = []
    for weight in weights:
        parts = tuple(places[weight.path])
        axis = _axis(weight, parts[0])
        if sharding.is_divided and "shards" not in parts[0].path:
            _refuse_heads(weight)
        weights_with_parts.append(ShardedWeight(weight, parts, axis, sharding))
    return weights_with_parts


def _inside(path: Path, layers: Container[Path]) -> Path | None:
    """Returns the layer that has this path inside, or None."""
    return next((path[:end] for end in range(len(path)) if path[:end] in layers), None)


def _in_whole(path: Path) -> tuple[Path, int | None]:
    """Returns the path of a parameter in the whole model, and its shard if it is in one."""
    if "shards" not in path:
        return path, None
    at = path.index("shards")
    return (*path[:at], *path[at + 2 :]), cast(int, path[at + 1])


def _refuse_heads(weight: Weight) -> None:
    """Refuses a product that has heads and is not sharded."""
    names = {name for index in range(len(weight.shape)) for name, _ in _parts(weight, index)}
    if len(weight.shape) > 1 and names & {"heads", "kv_heads"}:
        raise UnsupportedError(
            f"tensor_parallel_size: {weight.sources[0].pieces[0].name} is of a layer that "
            "this version does not divide"
        )


def entry_at(tree: Mapping[Any, Any], path: Path) -> Any:
    """Returns the entry of a tree at that path."""
    return functools.reduce(lambda branch, key: branch[key], path, tree)


def join_weights(weights: Iterable[ShardedWeight], parameters: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the whole weights, on the host, of a sharded model's parameters."""
    tree: dict[Any, Any] = {}
    for sharded in weights:
        whole: Any = None
        for place in sharded.places:
            array = np.asarray(entry_at(parameters, place.path))
            if whole is None:
                whole = (
                    array if sharded.axis is None else np.empty(sharded.weight.shape, array.dtype)
                )
            if sharded.axis is not None:
                sharded.fill(whole, place, array)
        branch = tree
        for key in sharded.weight.path[:-1]:
            branch = branch.setdefault(key, {})
        branch[sharded.weight.path[-1]] = whole
    return tree


def _axis(weight: Weight, place: Place) -> int | None:
    """Returns the axis that is sharded, or None."""
    return next(
        (index for index, size in enumerate(weight.shape) if size != place.shape[index]), None
    )


def _parts(weight: Weight, axis: int) -> tuple[tuple[str | None, int], ...]:
    return parts_of(weight.axes[axis], weight.shape[axis])
