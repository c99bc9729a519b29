"""How long a step takes: the protocol of a cost model, and the analytic ones of the PagedAttention paper's machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from jaxpage.step.plan import StepPlan


class CostModel(Protocol):
    """A machine, as far as the virtual clock is concerned."""

    def compute_seconds(self, plan: StepPlan) -> float:
        """From the plan to its draws, without swapping."""

    def swap_seconds(self, num_blocks: int, block_size: int) -> float:
        """Moves blocks between device and host, one way."""


@dataclass(frozen=True)
class AnalyticCost:
    """A step reads the weights or is bound by arithmetic, whichever is longer; keys and values are read in addition. Seconds.

    Block copies within the device are not charged: one of OPT-13B's moves 12.5 MiB, 17 microseconds of an A100's memory.
    """

    step: float  # of host work that does not depend on the batch
    sequence: float  # of host work for each row
    weights: float  # reading all weights once
    token: float  # arithmetic for each query token
    context_token: float  # reading the keys and values of one position
    copies_per_block: int  # pieces in which a block is swapped: keys and values of every layer
    copy: float  # starting one such copy
    copied_token: float  # moving one position of one of them

    def compute_seconds(self, plan: StepPlan) -> float:
        context = sum([row.context_length for row in plan.rows])
        device = max(self.weights, self.token * plan.num_tokens) + self.context_token * context
        return self.step + self.sequence * len(plan.rows) + device

    def swap_seconds(self, num_blocks: int, block_size: int) -> float:
        return num_blocks * self.copies_per_block * (self.copy + block_size * self.copied_token)


# OPT-13B in float16 on one A100-40GB. Derived: 26 GB of weights at 85 % of 1.555 TB/s; 800 KiB a
# position at 70 %; 26 GFLOP a token at 217 TFLOP/s; a swap over 25 GB/s. `step` and `sequence` are
# fitted to the 45 and 75 ms a step that the paper's figure 13 implies by Little's law, `copy` to
# its figure 19a.
A100_OPT_13B = AnalyticCost(
    step=13e-3,
    sequence=0.20e-3,
    weights=19.7e-3,
    token=0.12e-3,
    context_token=0.75e-6,
    copies_per_block=2 * 40,
    copy=2.2e-6,
    copied_token=5120 * 2 / 25e9,
)

# OPT-66B on four A100-40GB and OPT-175B on eight A100-80GB (2.039 TB/s), each with its share of
# weights, keys and values. Derived in the same way, but for `step`, to which two all-reduces of 30
# microseconds in each of 64 and 96 layers were added, a guess.
A100_OPT_66B = AnalyticCost(
    step=13e-3 + 64 * 2 * 30e-6,
    sequence=0.20e-3,
    weights=132e9 / 4 / (0.85 * 1.555e12),
    token=2 * 66e9 / (4 * 217e12),
    context_token=2.25 * 2**20 / 4 / (0.7 * 1.555e12),
    copies_per_block=2 * 64,
    copy=2.2e-6,
    copied_token=9216 / 4 * 2 / 25e9,
)
A100_OPT_175B = AnalyticCost(
    step=13e-3 + 96 * 2 * 30e-6,
    sequence=0.20e-3,
    weights=346e9 / 8 / (0.85 * 2.039e12),
    token=2 * 173e9 / (8 * 217e12),
    context_token=4.5 * 2**20 / 8 / (0.7 * 2.039e12),
    copies_per_block=2 * 96,
    copy=2.2e-6,
    copied_token=12288 / 8 * 2 / 25e9,
)
