"""Token ids in the parameters of a request: a list that may be as long as the vocabulary, and is looked at in every step."""

from __future__ import annotations

from functools import cached_property
from typing import Any


class TokenIds(tuple[int, ...]):
    """Each id once. What is made of them is made once, however many prompts, sequences and steps share the parameters."""

    @cached_property
    def as_set(self) -> frozenset[int]:
        return frozenset(self)

    @cached_property
    def masks(self) -> dict[int, Any]:
        """By the size of the vocabulary: see `token_masks.mask_of_ids`."""
        return {}
