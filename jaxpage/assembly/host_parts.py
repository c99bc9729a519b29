"""Makes the host's parts of an engine from its settings and its specification."""

from __future__ import annotations

from jaxpage.assembly.engine_spec import EngineSpec
from jaxpage.engine.batch_builder import BatchBuilder
from jaxpage.memory import BlockManager, BlockPool, BlockTables, PrefixIndex
from jaxpage.scheduling import POLICIES, Preemption, Scheduler
from jaxpage.settings.engine_config import EngineConfig


def make_scheduler(config: EngineConfig, spec: EngineSpec) -> Scheduler:
    """Returns a scheduler over new, empty block tables of all cache groups."""
    tables = [
        BlockTables(
            BlockPool(blocks.stop, first=blocks.start),
            config.block_size,
            host_pool=BlockPool(host_blocks.stop, first=host_blocks.start) if host_blocks else None,
            sliding_window=group.sliding_window,
            max_tokens=spec.limits.longest_row,
        )
        for group, blocks, host_blocks in zip(spec.groups, spec.blocks, spec.host_blocks, strict=True)
    ]
    manager = BlockManager(tables, PrefixIndex(config.block_size) if config.enable_prefix_caching else None)
    return Scheduler(
        spec.limits,
        manager,
        max_num_seqs=config.max_num_seqs,
        queue=POLICIES[config.scheduling_policy](),
        preemption=Preemption(config.preemption_mode, config.new_requests_wait_until),
        max_loras=config.max_loras if config.enable_lora else 0,
    )


def make_builder(spec: EngineSpec, max_loras: int) -> BatchBuilder:
    """Returns the builder that pads plans to the step shapes of this engine.

    Args:
        spec: The specification of the engine.
        max_loras: The number of LoRA slots on the device.
    """
    return BatchBuilder(
        spec.menu,
        table_width=spec.tables.width,
        block_size=spec.memory.block_size,
        blocks=spec.blocks,
        vocab_size=spec.vocab_size,
        host_blocks=spec.host_blocks,
        max_loras=max_loras,
    )
