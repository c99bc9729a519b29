"""What a backend admits in one step, and the scheduler's constants: every number that shapes a plan stands here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Share of the pool that admitting a request must leave free while others run, so that they do not preempt it at once
# (the watermark of vLLM's first version, which the PagedAttention paper measured). Never less than one block.
WATERMARK = 0.01


@dataclass(frozen=True)
class Preemption:
    """What becomes of a group that is preempted, and what new ones wait for (PagedAttention, section 4.5).

    mode: "recompute" computes its tokens again, "swap" moves its blocks to host memory and back, as long as there are host blocks.
        "auto" recomputes one sequence and swaps several: what several share is moved once, but would be computed once for each.
        It is not chosen by measured cost, so that the same events give the same schedule on every machine.
    new_wait_until: preempted groups are "readmitted", or, as the paper has it literally, "completed".
    """

    mode: Literal["auto", "recompute", "swap"] = "auto"
    new_wait_until: Literal["readmitted", "completed"] = "readmitted"

    def swaps(self, num_sequences: int) -> bool:
        return self.mode == "swap" or (self.mode == "auto" and num_sequences > 1)


def spare_blocks(num_usable: int, num_running: int, num_joining: int, *, resumes: bool) -> int:
    """Blocks that an admission must leave free.

    Who comes back after a preemption leaves one for every sequence that runs then, itself included: each takes at most one in S tokens,
    so that no preempted request comes back only to be preempted at once.

    Args:
        num_usable: blocks of the pool.
        num_running, num_joining: sequences.
    """
    if not num_running:
        return 0
    watermark = max(1, int(num_usable * WATERMARK))
    return max(watermark, num_running + num_joining) if resumes else watermark
