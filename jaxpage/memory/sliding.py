"""What a sliding window leaves of a block table. Two positions more than the window stay: the one before it, so that the last token can
be computed once more, and another, so that a block that becomes full finds the one before it in the table."""

from __future__ import annotations


def num_passed(num_tokens: int, window: int, block_size: int) -> int:
    """How many of a sequence's first blocks nobody needs who goes on behind its first `num_tokens` tokens."""
    return max(0, num_tokens - window - 1) // block_size


def most_blocks(window: int, max_tokens: int, block_size: int) -> int:
    """The blocks that a sequence needs at a time to compute up to `max_tokens` tokens in a step, wherever a block begins."""
    num_positions = window + 1 + max_tokens
    return (num_positions - 2) // block_size + 2
