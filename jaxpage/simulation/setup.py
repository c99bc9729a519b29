"""Makes the scheduler that is simulated: the engine's, over a pool of a given size."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxpage.memory import BlockManager, BlockPool, BlockTables, PrefixIndex
from jaxpage.scheduling import Preemption
from jaxpage.simulation.policies import PagedScheduler
from jaxpage.step.limits import StepLimits


@dataclass(frozen=True)
class Setup:
    """Holds the settings of a scheduler.

    The defaults are those of the PagedAttention paper's evaluation: OPT-13B on an A100-40GB, which
    has 15,728 slots.
    """

    num_blocks: int = 983  # without the null block
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2560
    prefix_caching: bool = False
    # There are as many host blocks to swap to as the pool has blocks.
    preemption: Preemption = field(default_factory=Preemption)

    def new_scheduler(self) -> PagedScheduler:
        """Returns a scheduler over an empty pool."""
        limits = StepLimits(
            self.max_num_seqs, self.max_num_batched_tokens, self.max_num_seqs, mixed=True
        )
        index = PrefixIndex(self.block_size) if self.prefix_caching else None
        pool = BlockPool(self.num_blocks + 1)
        host_pool = BlockPool(self.num_blocks + 1)
        manager = BlockManager([BlockTables(pool, self.block_size, host_pool=host_pool)], index)
        return PagedScheduler(
            limits, manager, max_num_seqs=self.max_num_seqs, preemption=self.preemption
        )
