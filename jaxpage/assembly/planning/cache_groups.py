"""Sorts layers into cache groups: layers that see equally far back share block tables.

Each group has blocks of its own. Recurrent layers are a group of kind `state`. They need their
blocks as layers with a window do: the block that is computed, the block before it, whose state is
continued, and the blocks with the inputs that a convolution reaches back to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax.typing import DTypeLike

from jaxpage.device.pages import bytes_of_pages, page_shapes
from jaxpage.layers.context import StateSpec
from jaxpage.models import KVSpec


@dataclass(frozen=True)
class CacheGroup:
    """Holds the layers that share block tables.

    Their heads may differ, because every layer has arrays of its own.

    Attributes:
        layers: The places among the model's layers, which a drafter's layers follow.
        sliding_window: The positions that the layers see, a token's own included; None for all.
        block_bytes: The bytes of one block in all these layers.
        array_elements: The elements of one block in the largest array of keys or values.
        is_state: The layers are recurrent; `state_window` says what their window is.
    """

    layers: tuple[int, ...]
    sliding_window: int | None
    block_bytes: int
    array_elements: int
    is_state: bool = False


def state_window(state: StateSpec, block_size: int) -> int:
    """Returns how many positions a token of a recurrent layer needs, its own included.

    See `device.recurrence`. A convolution alone needs what it reaches back to.
    """
    if state.shape is None:
        return 1 + state.lookback
    return block_size + max(1, state.lookback)


def cache_groups(
    kvs: Sequence[KVSpec],
    *,
    max_length: int,
    block_size: int,
    dtype: DTypeLike,
    num_shards: int = 1,
    interleaved: bool = False,
) -> tuple[CacheGroup, ...]:
    """Returns the cache groups of a model; the group whose layers see most comes first.

    Args:
        kvs: What the layers of the model keep, and those of a drafter.
        max_length: The positions of the longest sequence; a window that is no shorter counts as
            none.
        block_size: The slots of a block (S).
        dtype: The type of the pages.
        num_shards: The shards of the model on a device, each with arrays of its own; `kvs` has what
            one of them keeps.
        interleaved: See `page_shapes`.
    """
    kinds = _kinds(kvs, max_length, block_size)
    layer_bytes = [
        # Only the model, which comes first, is in shards; each device has a drafter once.
        bytes_of_pages((layer,)) * (1 if index else num_shards)
        for index, kv in enumerate(kvs)
        for layer in page_shapes(kv, 1, block_size, dtype, interleaved=interleaved)
    ]
    elements = [
        block_size * math.prod(kv.heads_of(layer)) for kv in kvs for layer in range(kv.num_layers)
    ]
    groups = []
    # The largest reach comes first, infinity before all.
    for kind in sorted(set(kinds), reverse=True):
        layers = tuple(index for index, of_layer in enumerate(kinds) if of_layer == kind)
        block_bytes = sum(layer_bytes[place] for place in layers)
        # No attention kernel addresses states, so these bound no pool.
        maximum = 1 if kind.is_state else max(elements[place] for place in layers)
        window = None if kind.reach == math.inf else int(kind.reach)
        groups.append(CacheGroup(layers, window, block_bytes, maximum, kind.is_state))
    return tuple(groups)


class _Kind(NamedTuple):
    """Identifies a kind of layer; layers of one kind share a cache group.

    Attributes:
        reach: The positions that the layer sees; infinite for all.
        is_state: The layer is recurrent.
    """

    reach: float
    is_state: bool


def _kinds(kvs: Sequence[KVSpec], max_length: int, block_size: int) -> list[_Kind]:
    """Returns the kind of each layer."""
    kinds = []
    for kv in kvs:
        for layer, window in enumerate(kv.sliding_windows):
            if (state := kv.state_of(layer)) is not None:
                kinds.append(_Kind(state_window(state, block_size), True))
            else:
                kinds.append(
                    _Kind(math.inf if window is None or window >= max_length else window, False)
                )
    return kinds


def group_of_layers(groups: Sequence[CacheGroup]) -> tuple[int, ...]:
    """Returns the place of each layer's cache group."""
    places = {layer: index for index, group in enumerate(groups) for layer in group.layers}
    return tuple(places[layer] for layer in sorted(places))
