"""Walks through the block manager and the scheduler step by step, with block tables as text: examples/walkthrough.ipynb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxpage.memory import BlockManager, BlockPool, BlockTables
from jaxpage.simulation.beams import Ancestry
from jaxpage.simulation.scripts import ScriptedRequests
from jaxpage.simulation.setup import Setup
from jaxpage.simulation.traces import Arrival
from jaxpage.step.plan import StepPlan

EMPTY = "·"


class Walk:
    """Sequences that write words into the real block manager, and the words in the place of keys and values."""

    def __init__(
        self, free_order: Sequence[int] = (), *, num_blocks: int = 10, block_size: int = 4
    ) -> None:
        """free_order: the blocks that are handed out first, as the paper's figures have them."""
        self.pool = BlockPool(num_blocks, free_order=list(free_order))
        self.manager = BlockManager([BlockTables(self.pool, block_size)])
        self.words: dict[int, list[str]] = {}  # by block
        self.lengths: dict[str, int] = {}  # by sequence
        self._ids: dict[str, int] = {}

    def write(self, name: str, *words: str) -> tuple[tuple[int, int], ...]:
        """Reserves slots for the words, copies blocks that others read, and writes. Returns the (source, destination) copies."""
        start = self.lengths.setdefault(name, 0)
        sequence_id = self._ids.setdefault(name, len(self._ids))
        copies = self.manager.reserve(sequence_id, start, start + len(words))
        for source, destination in copies:
            self.words[destination] = list(self.words[source])
        table, size = self.manager.block_tables(sequence_id)[0], self.manager.block_size
        for position, word in enumerate(words, start):
            if position % size == 0:
                self.words[table[position // size]] = [EMPTY] * size
            self.words[table[position // size]][position % size] = word
        self.lengths[name] = start + len(words)
        self.manager.check()
        return copies

    def fork(self, parent: str, child: str) -> None:
        sequence_id = self._ids.setdefault(child, len(self._ids))
        self.manager.fork(self._ids[parent], sequence_id)
        self.lengths[child] = self.lengths[parent]

    def release(self, name: str) -> list[int]:
        """Returns the blocks that nobody reads any more."""
        table = self.table(name)
        self.manager.release(self._ids[name])
        del self.lengths[name]
        return [block for block in table if not self.pool.ref_count(block)]

    def table(self, name: str) -> list[int]:
        return list(self.manager.block_tables(self._ids[name])[0])

    def show(self, title: str = "") -> None:
        """Prints the block table of each sequence with its filled slots, and the blocks with their words and reference counts."""
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
                    f"  block {block:>2} x{count} |{'|'.join(word.center(8) for word in self.words[block])}|"
                )


def walk_steps(
    setup: Setup,
    arrivals: Sequence[Arrival],
    num_steps: int,
    *,
    ancestries: Mapping[int, Sequence[Ancestry]] | None = None,
) -> list[StepPlan]:
    """Plans and commits steps of the real scheduler, and prints what each does and the block tables behind it. An arrival's seconds are
    the step before which it comes. Returns the plans."""
    scheduler, requests, plans = setup.new_scheduler(), ScriptedRequests(ancestries), []
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
        for what, pairs in (
            ("copy on write", plan.copies),
            ("swap out", plan.swap_out),
            ("swap in", plan.swap_in),
        ):
            if pairs:
                print(
                    f"   {what}: {', '.join(f'{source} -> {destination}' for source, destination in pairs)}"
                )
        if plan.preempted:
            print(f"   preempted, whole: request {', '.join(plan.preempted)}")
        scheduler.commit(plan, requests.edits(plan))
        scheduler.check()
        for group in scheduler.running:
            for sequence in group.unfinished:
                table = scheduler.block_manager.block_tables(sequence.sequence_id)[0]
                print(
                    f"   request {group.request.request_id}, sequence {sequence.sequence_id}: blocks {list(table)}"
                )
        manager = scheduler.block_manager
        print(
            f"   {manager.num_free} of {manager.num_usable} blocks are free; {scheduler.num_waiting} requests wait"
        )
    return plans
