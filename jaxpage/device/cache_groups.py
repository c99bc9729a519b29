"""Cache groups: layers that see equally far back share block tables, and have blocks of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jax.typing import DTypeLike

from jaxpage.device.kv_pages import KVPages, bytes_per_layer
from jaxpage.models.base import KVSpec


@dataclass(frozen=True)
class CacheGroup:
    """Heads and their width may differ within one: every layer has arrays of its own.

    layers: places among the model's layers and, behind them, a drafter's.
    sliding_window: positions that they see, the own one included; None: all.
    block_bytes: of one block in all of them.
    array_elements: of one block in the largest array of keys or values.
    """

    layers: tuple[int, ...]
    sliding_window: int | None
    block_bytes: int
    array_elements: int


def cache_groups(kvs: Sequence[KVSpec], *, longest: int, block_size: int, dtype: DTypeLike) -> tuple[CacheGroup, ...]:
    """Those of the layers that see most come first.

    Args:
        kvs: of the model, and of a drafter.
        longest: positions of the longest sequence: a window that is no shorter is none.
        dtype: of the pages.
    """
    windows = [
        window if window is not None and window < longest else None for kv in kvs for window in kv.sliding_windows
    ]
    layer_bytes = [bytes_per_layer(kv, block_size, dtype) for kv in kvs for _ in range(kv.num_layers)]
    elements = [block_size * kv.num_kv_heads * kv.head_width for kv in kvs for _ in range(kv.num_layers)]
    groups = []
    for window in sorted(set(windows), key=lambda window: -(window or longest)):
        layers = tuple(place for place, of_layer in enumerate(windows) if of_layer == window)
        block_bytes, most = sum(layer_bytes[place] for place in layers), max(elements[place] for place in layers)
        groups.append(CacheGroup(layers, window, block_bytes, most))
    return tuple(groups)


def group_of_layers(groups: Sequence[CacheGroup]) -> tuple[int, ...]:
    """The group's place, of each layer."""
    places = {layer: place for place, group in enumerate(groups) for layer in group.layers}
    return tuple(places[layer] for layer in sorted(places))


def in_groups(pages: KVPages, layer_groups: tuple[int, ...], move: Callable[[int, KVPages], KVPages]) -> KVPages:
    """The pages of all layers after `move(place of a group, pages of its layers)` for each group that has any."""
    if len(set(layer_groups)) == 1:
        return move(layer_groups[0], pages)
    moved = list(pages)
    for group in sorted(set(layer_groups)):
        layers = [layer for layer, of_layer in enumerate(layer_groups) if of_layer == group]
        for layer, new in zip(layers, move(group, tuple(pages[layer] for layer in layers)), strict=True):
            moved[layer] = new
    return tuple(moved)
