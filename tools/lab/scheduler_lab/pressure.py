"""Sends requests all at once into a pool that holds only a part of them.

It shows whether everything finishes, and what preemption costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jaxpage.scheduling import Preemption
from jaxpage.simulation.accounting import Run
from jaxpage.simulation.costs import A100_OPT_13B, CostModel
from jaxpage.simulation.setup import Setup
from jaxpage.simulation.simulator import Simulator
from jaxpage.simulation.traces import Arrival, poisson_trace

Mode = Literal["recompute", "swap"]


@dataclass(frozen=True)
class Pressure:
    """Holds one run.

    The pool had `share` of the blocks that all requests would have at the same time in the end.
    """

    share: float
    mode: Mode
    num_blocks: int
    run: Run


def requests_at_once(dataset: str, num_requests: int, seed: int = 0) -> list[Arrival]:
    """Returns requests with the lengths of a dataset that all arrive at time 0."""
    trace = poisson_trace(dataset, rate=2.0, seconds=num_requests, seed=seed)
    return [replace(arrival, seconds=0.0) for arrival in trace[:num_requests]]


def demand(requests: Sequence[Arrival], block_size: int) -> int:
    """Returns how many blocks the requests have at their last tokens.

    The last token of a request is drawn and never computed, so it needs no slot.
    """
    lengths = [request.num_prompt_tokens + request.num_output_tokens - 1 for request in requests]
    return sum(-(-length // block_size) for length in lengths)


def press(
    requests: Sequence[Arrival], share: float, mode: Mode, cost: CostModel = A100_OPT_13B
) -> Pressure:
    """Runs the requests to their ends."""
    num_blocks = int(share * demand(requests, Setup.block_size))
    setup = Setup(num_blocks=num_blocks, preemption=Preemption(mode))
    return Pressure(share, mode, num_blocks, Simulator(requests, setup.new_scheduler(), cost).run())
