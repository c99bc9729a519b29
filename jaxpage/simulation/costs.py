"""Says how long a step takes: the protocol of a cost model, and models of the paper's machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from jaxpage.step.plan import StepPlan


class CostModel(Protocol):
    """Says what the virtual clock needs to know about a machine."""

    def compute_seconds(self, plan: StepPlan) -> float:
        """Returns the seconds from the plan of a step to its draws, without swapping."""

    def swap_seconds(self, num_blocks: int, block_size: int) -> float:
        """Returns the seconds for moving blocks between device and host in one direction."""


@dataclass(frozen=True)
class AnalyticCost:
    """Computes the seconds of a step from the numbers of a machine and a model.

    A step takes the time to read the weights or the time of its arithmetic, whichever is longer.
    Reading keys and values is added. Block copies within the device cost nothing here: a copy for
    OPT-13B moves 12.5 MiB, which takes an A100's memory 17 microseconds.

    Attributes:
        step: The host work of a step that does not depend on the batch.
        sequence: The host work for each row.
        weights: Reading all weights once.
        token: The arithmetic for each query token.
        context_token: Reading the keys and values of one position.
        copies_per_block: The pieces in which a block is swapped: keys and values of every layer.
        copy: Starting one such copy.
        copied_token: Moving one position of one copy.
    """

    step: float
    sequence: float
    weights: float
    token: float
    context_token: float
    copies_per_block: int
    copy: float
    copied_token: float

    def compute_seconds(self, plan: StepPlan) -> float:
        """Returns the seconds from the plan of a step to its draws, without swapping."""
        context = sum([row.context_length for row in plan.rows])
        device = max(self.weights, self.token * plan.num_tokens) + self.context_token * context
        return self.step + self.sequence * len(plan.rows) + device

    def swap_seconds(self, num_blocks: int, block_size: int) -> float:
        """Returns the seconds for moving blocks between device and host in one direction."""
        return num_blocks * self.copies_per_block * (self.copy + block_size * self.copied_token)


# OPT-13B in float16 on one A100-40GB. These numbers are derived: 26 GB of weights at 85 % of
# 1.555 TB/s; 800 KiB a position at 70 %; 26 GFLOP a token at 217 TFLOP/s; a swap over 25 GB/s.
# `step` and `sequence` are fitted to the 45 and 75 ms a step that the paper's figure 13 implies by
# Little's law, and `copy` is fitted to its figure 19a.
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

# OPT-66B on four A100-40GB and OPT-175B on eight A100-80GB (2.039 TB/s), each GPU with its share of
# weights, keys and values. They are derived in the same way. Only `step` differs: it includes two
# all-reduces of 30 microseconds, a guess, in each of 64 and 96 layers.
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
