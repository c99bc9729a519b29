"""Holds the token ids in the parameters of a request.

Such a list may be as long as the vocabulary, and every step reads it.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any


class TokenIds(tuple[int, ...]):
    """Holds token ids, each of them once, with everything that is computed from them.

    It is computed once, however many prompts, sequences and steps share the parameters.
    """

    @cached_property
    def as_set(self) -> frozenset[int]:
        """Returns the ids as a set."""
        return frozenset(self)

    @cached_property
    def masks(self) -> dict[int, Any]:
        """Returns the masks made so far by vocabulary size; see `token_masks.mask_of_ids`."""
        return {}
