"""Copies whole blocks inside the pool, for copy-on-write. Donate the pages and the copies happen in place."""

from __future__ import annotations

from typing import TypeVar

import jax
from jaxtyping import Array, Int

Pages = TypeVar("Pages")


def copy_blocks(pages: Pages, source: Int[Array, "n"], destination: Int[Array, "n"]) -> Pages:
    """Returns a pytree of pages [P, S, ...] in which each `destination[i]` holds what `source[i]` held before the call.

    All sources are read before anything is written, so that a block may be source and destination of the same call. Pad the two
    with the null block (0, 0).
    """
    copied: Pages = jax.tree.map(lambda array: array.at[destination].set(array[source], mode="drop"), pages)
    return copied
