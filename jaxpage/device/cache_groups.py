"""Cache groups: layers that see equally far back share block tables, and have blocks of their own.

Recurrent layers are a group of kind `state`. They need their blocks as layers with a window do: the block that is computed, the one before
it, whose state it goes on from, and those whose inputs a convolution reaches back to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax.typing import DTypeLike

from jaxpage.device.kv_pages import KVPages, num_bytes, page_shapes
from jaxpage.layers.context import StateSpec
from jaxpage.models.base import KVSpec


@dataclass(frozen=True)
class CacheGroup:
    """The layers that share block tables. Their heads may differ: every layer has arrays of its own.

    layers: places among the model's layers, followed by a drafter's.
    sliding_window: positions that the layers see, a token's own included; None: all.
    block_bytes: bytes of one block in all these layers.
    array_elements: numbers of one block in the largest array of keys or values.
    is_state: whether the layers are recurrent; then `state_window` says what the window is.
    """

    layers: tuple[int, ...]
    sliding_window: int | None
    block_bytes: int
    array_elements: int
    is_state: bool = False


def state_window(state: StateSpec, block_size: int) -> int:
    """Up to so many positions before it, its own included, a token needs something of: see `device.recurrence`."""
    return block_size + max(1, state.lookback)


def cache_groups(
    kvs: Sequence[KVSpec], *, longest: int, block_size: int, dtype: DTypeLike, num_shards: int = 1
) -> tuple[CacheGroup, ...]:
    """Returns the cache groups of a model; the group whose layers see most comes first.

    Args:
        kvs: what the layers of the model keep, and those of a drafter.
        longest: positions of the longest sequence: a window that is no shorter is none.
        dtype: the pages' type.
        num_shards: shards of the model on a device, each with arrays of its own; `kvs` has what one of them keeps.
    """
    kinds = _kinds(kvs, longest, block_size)
    layer_bytes = [
        num_bytes((layer,)) * (1 if place else num_shards)
        for place, kv in enumerate(kvs)
        for layer in page_shapes(kv, 1, block_size, dtype)
    ]
    elements = [
        block_size * kv.num_kv_heads * kv.head_width for kv in kvs for _ in range(kv.num_layers)
    ]
    groups = []
    for kind in sorted(set(kinds), reverse=True):
        layers = tuple(place for place, of_layer in enumerate(kinds) if of_layer == kind)
        block_bytes = sum(layer_bytes[place] for place in layers)
        most = 1 if kind.is_state else max(elements[place] for place in layers)
        window = None if kind.reach == math.inf else int(kind.reach)
        groups.append(CacheGroup(layers, window, block_bytes, most, kind.is_state))
    return tuple(groups)


class _Kind(NamedTuple):
    """The kind of a layer: layers of one kind share a cache group. reach: positions that it sees; infinite: all."""

    reach: float
    is_state: bool


def _kinds(kvs: Sequence[KVSpec], longest: int, block_size: int) -> list[_Kind]:
    """Returns the kind of each layer."""
    kinds = []
    for kv in kvs:
        for layer, window in enumerate(kv.sliding_windows):
            if (state := kv.state_of(layer)) is not None:
                kinds.append(_Kind(state_window(state, block_size), True))
            else:
                kinds.append(
                    _Kind(math.inf if window is None or window >= longest else window, False)
                )
    return kinds


def group_of_layers(groups: Sequence[CacheGroup]) -> tuple[int, ...]:
    """The group's place, of each layer."""
    places = {layer: place for place, group in enumerate(groups) for layer in group.layers}
    return tuple(places[layer] for layer in sorted(places))


def in_groups(
    pages: KVPages, layer_groups: tuple[int, ...], move: Callable[[int, KVPages], KVPages]
) -> KVPages:
    """The pages of all layers after `move(place of a group, pages of its layers)` for each group that has any."""
    if len(set(layer_groups)) == 1:
        return move(layer_groups[0], pages)
    moved = list(pages)
    for group in sorted(set(layer_groups)):
        layers = [layer for layer, of_layer in enumerate(layer_groups) if of_layer == group]
        for layer, new in zip(
            layers, move(group, tuple(pages[layer] for layer in layers)), strict=True
        ):
            moved[layer] = new
    return tuple(moved)
