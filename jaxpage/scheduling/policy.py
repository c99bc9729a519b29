"""Holds the settings of preemption, and the numbers that decide about an admission."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# The share of the pool that an admission leaves free while other requests run, so that it does not
# lead to a preemption at once: the watermark of vLLM's first version, which the PagedAttention
# paper measured. It is never less than one block.
WATERMARK = 0.01


@dataclass(frozen=True)
class Preemption:
    """Says what becomes of a preempted group (PagedAttention, section 4.5).

    No mode compares measured costs, so the same events give the same schedule on every machine.

    Attributes:
        mode: "recompute" computes the tokens of the group again. "swap" moves its blocks to host
            memory and back, as long as host blocks are free. "auto" recomputes a group of one
            sequence and swaps a group of several: a block that several sequences share is moved
            once, but would be computed once for each of them.
        new_wait_until: New groups are admitted when the preempted ones are "readmitted" or, as the
            paper has it literally, "completed".
    """

    mode: Literal["auto", "recompute", "swap"] = "auto"
    new_wait_until: Literal["readmitted", "completed"] = "readmitted"

    def swaps(self, num_sequences: int) -> bool:
        """Returns whether a group of this many sequences is swapped instead of recomputed."""
        return self.mode == "swap" or (self.mode == "auto" and num_sequences > 1)


def spare_blocks(num_usable: int, num_running: int, num_joining: int, *, resumes: bool) -> int:
    """Returns how many blocks of a pool an admission must leave free.

    A group that was preempted leaves a block for every sequence that runs after its admission, its
    own included. Each of them takes at most one block in S tokens, so the group is not preempted
    again as soon as it is back.

    Args:
        num_usable: The number of blocks that the pool can hand out at all.
        num_running: The number of sequences that run.
        num_joining: The number of sequences of the group that is to be admitted.
        resumes: True if the group was preempted before.
    """
    if not num_running:
        return 0
    watermark = max(1, int(num_usable * WATERMARK))
    return max(watermark, num_running + num_joining) if resumes else watermark
