"""Defines how many tokens a request may spend on its reasoning, and what the reasoning is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ThinkingBudget:
    """Holds the budget of a request, with the markers around the reasoning as bytes.

    Attributes:
        num_tokens: The most tokens of reasoning.
        is_open: True if the prompt ends with the opening marker, so that the answer begins with
            reasoning.
        open: The marker before the reasoning. An answer that does not begin with it has none.
        close: The marker after the reasoning, which is not empty.
        again: True if the opening marker begins reasoning wherever it comes in the answer.
        endings: The tokens that write the rest of the closing marker, by the number of its bytes
            that are there already.
        vocab_size: The number of token ids (V).
        bytes_of: Returns the bytes that a token stands for.
    """

    num_tokens: int
    is_open: bool
    open: bytes
    close: bytes
    again: bool
    endings: tuple[tuple[int, ...], ...]
    vocab_size: int
    bytes_of: Callable[[int], bytes]
