"""Walks through the block manager and the scheduler step by step, for examples/walkthrough.ipynb.

It prints block tables as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxpage.memory import BlockManager, BlockPool, BlockTables
from jaxpage.simulation.beams import Ancestry
from jaxpage.simulation.scripts import ScriptedRequests
from jaxpage.simulation.setup import Setup
from jaxpage.simulation.traces import Arrival
from jaxpage.step.plan import StepPlan
from jaxpage.step.request import SequenceGroup

EMPTY = "·"


class BlockWalk:
    """Writes words into the real block manager, as if they were keys and values.

    Attributes:
        pool: The pool of blocks.
        manager: The block manager over the pool.
        words: The words in each block, by block.
        lengths: The number of words of each sequence, by name.
    """

    def __init__(
        self, free_order: Sequence[int] = (), *, num_blocks: int = 10, block_size: int = 4
    ) -> None:
        """Begins with an empty pool.

        Args:
            free_order: The blocks that are handed out first, in the order of the paper's figures.
            num_blocks: The blocks of the pool, with the null block.
            block_size: The slots of a block (S).
        """
        self.pool = BlockPool(num_blocks, free_order=list(free_order))
        self.manager = BlockManager([BlockTables(self.pool, block_size)])
        self.words: dict[int, list[str]] = {}
        self.lengths: dict[str, int] = {}
        self._ids: dict[str, int] = {}

    def write(self, name: str, *words: str) -> tuple[tuple[int, int], ...]:
        """Reserves slots for the words, copies blocks that others read, and writes.

        Returns:
            The copies as pairs (source, destination).
        """
        start = self.lengths.setdefault(name, 0)
        sequence_id = self._ids.setdefault(name, len(self._ids))
        copies = self.manager.reserve(sequence_id, start, start + len(words))
        for source, destination in copies:
            self.words[destination] = list(self.words[source])
        table = self.manager.block_tables(sequence_id)[0]
        size = self.manager.block_size
        for position, word in enumerate(words, start):
            if position % size == 0:
                self.words[table[position // size]] = [EMPTY] * size
            self.words[table[position // size]][position % size] = word
        self.lengths[name] = start + len(words)
        self.manager.check()
        return copies

    def fork(self, parent: str, child: str) -> None:
        """Makes a sequence that shares all blocks of its parent."""
        sequence_id = self._ids.setdefault(child, len(self._ids))
        self.manager.fork(self._ids[parent], sequence_id)
        self.lengths[child] = self.lengths[parent]

    def release(self, name: str) -> list[int]:
        """Releases a sequence; returns the blocks that no other sequence reads."""
        table = self.table(name)
        self.manager.release(self._ids[name])
        del self.lengths[name]
        return [block for block in table if not self.pool.ref_count(block)]

    def table(self, name: str) -> list[int]:
        """Returns the block table of a sequence."""
        return list(self.manager.block_tables(self._ids[name])[0])

    def show(self, title: str = "") -> None:
        """Prints block tables with filled slots, and blocks with words and reference counts."""
        print(f"-- {title}" if title else "--")
        size = self.manager.block_size
        for name, length in self.lengths.items():
            filled = [min(size, length - start) for start in range(0, length, size)]
            entries = (
                f"{block} ({count})" for block, count in zip(self.table(name), filled, strict=True)
            )
            print(f"{name}: logical 0, 1, ... -> block (filled): {', '.join(entries)}")
        for block in sorted(self.words):
            if count := self.pool.ref_count(block):
                print(
                    f"  block {block:>2} x{count} "
                    f"|{'|'.join(word.center(8) for word in self.words[block])}|"
                )


def walk_steps(
    setup: Setup,
    arrivals: Sequence[Arrival],
    num_steps: int,
    *,
    ancestries: Mapping[int, Sequence[Ancestry]] | None = None,
) -> list[StepPlan]:
    """Plans and commits steps of the real scheduler, and prints each of them with its block tables.

    Args:
        setup: The scheduler.
        arrivals: The requests; the seconds of an arrival are the step before which it comes.
        num_steps: The most steps.
        ancestries: The ancestries of beam searches; see `ScriptedRequests`.

    Returns:
        The plans of the steps.
    """
    scheduler = setup.new_scheduler()
    requests = ScriptedRequests(ancestries)
    plans = []
    for step in range(num_steps):
        for arrival in arrivals:
            if arrival.seconds == step:
                scheduler.add(requests.new_group(arrival))
        plan = scheduler.plan()
        if plan is None:
            break
        plans.append(plan)
        owners = {row.sequence_id: len(row.token_ids) for row in plan.rows}
        work = ", ".join(
            f"sequence {sequence_id}: {count}" for sequence_id, count in owners.items()
        )
        print(f"-- step {step}: tokens to compute: {work}")
        for operation, pairs in (
            ("copy on write", plan.copies),
            ("swap out", plan.swap_out),
            ("swap in", plan.swap_in),
        ):
            if pairs:
                print(
                    f"   {operation}: {', '.join(f'{source} -> {destination}' for source, destination in pairs)}"
                )
        if plan.preempted:
            print(f"   preempted, whole: request {', '.join(plan.preempted)}")
        scheduler.commit(plan, requests.edits(plan))
        scheduler.check()
        _print_tables(scheduler.running, scheduler.block_manager)
        blocks = scheduler.block_counts()
        print(
            f"   {blocks.num_free} of {blocks.num_usable} blocks are free; "
            f"{scheduler.num_waiting} requests wait"
        )
    return plans


def _print_tables(groups: Sequence[SequenceGroup], manager: BlockManager) -> None:
    for group in groups:
        for sequence in group.unfinished:
            table = manager.block_tables(sequence.sequence_id)[0]
            print(
                f"   request {group.request.request_id}, sequence "
                f"{sequence.sequence_id}: blocks {list(table)}"
            )
