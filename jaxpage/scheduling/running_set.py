"""Holds the groups of a scheduler: the running ones, the waiting ones, and their order.

How many decode steps one executable runs depends on them, too; `SeveralSteps` chooses it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from jaxpage.memory import BlockManager, MemorySplit, PrefixIndex
from jaxpage.scheduling import admitting
from jaxpage.scheduling.admitting import (
    Preemption,
    PrefixCounts,
    refuse_what_never_fits,
    spare_blocks,
)
from jaxpage.scheduling.plan_builder import PlanBuilder
from jaxpage.scheduling.queues import WaitingQueue
from jaxpage.step.limits import StepLimits
from jaxpage.step.request import Sequence, SequenceGroup

# The steps between two arrivals for each decode step that one executable runs, where their number
# adapts. A request that comes in the middle waits for all of them, up to 60 ms on a GPU, and what
# was computed after the end of a text is dropped. With this bound the wait is at most a sixteenth
# of the time since the last arrival, also where requests come at a steady rate, and so is the loss
# of a request alone, while the host's part falls to an eighth. Steps are counted, not seconds: a
# plan depends on events alone, which a replay repeats.
STEPS_FOR_ONE_MORE = 16


class RunningSet:
    """Holds all groups that are not finished: the running ones own blocks, the others wait.

    A group is admitted, preempted and resumed whole. Its admission reserves blocks for all tokens
    that it knows, but for those that a sliding window passes meanwhile. If a later step lacks
    blocks, the running group that ranks last is preempted: its blocks are swapped, or its tokens
    are computed again later. The group that ranks first is never preempted, and `add` has refused
    what could not run alone.

    The queue decides about the ranks and the order of admission; no group is admitted out of that
    order. A group begins with the cached or pinned blocks of its longest known prefix. To all other
    groups cached blocks are free blocks.

    Attributes:
        block_manager: The owner of all block tables.
        max_num_seqs: The most sequences that the running groups can have.
        num_preemptions: How many groups were preempted, by what became of them.
        prefix_counts: How many tokens were found in the prefix cache and among pins.
        sequences: Each sequence of an unfinished group, with the group, by its id.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        queue: WaitingQueue,
        preemption: Preemption,
        max_loras: int,
    ) -> None:
        """Makes a set without groups.

        Args:
            block_manager: The owner of the block tables.
            max_num_seqs: The most sequences that the running groups can have.
            queue: The waiting groups, under the scheduling policy.
            preemption: The settings of preemption.
            max_loras: The most LoRA adapters that the running groups may have.
        """
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.num_preemptions = {"recompute": 0, "swap": 0}
        self.prefix_counts = PrefixCounts()
        self.sequences: dict[int, tuple[SequenceGroup, Sequence]] = {}
        self._max_loras = max_loras
        self._preemption = preemption
        self._queue = queue
        # The keys of these three are request ids.
        self._groups: dict[str, SequenceGroup] = {}  # all of them, in order of arrival
        self._running: dict[str, SequenceGroup] = {}  # in order of rank
        self._was_preempted: set[str] = set()  # those that were preempted at least once
        self._num_sequence_slots = 0  # the sequences that the running groups can have
        self._num_arrivals = 0
        self._num_admissions = 0

    @property
    def groups(self) -> tuple[SequenceGroup, ...]:
        """Returns all groups in order of arrival."""
        return tuple(self._groups.values())

    @property
    def running(self) -> tuple[SequenceGroup, ...]:
        """Returns the groups that own blocks, in order of rank."""
        return tuple(self._running.values())

    @property
    def waiting(self) -> tuple[SequenceGroup, ...]:
        """Returns the groups that own no block of the pools, the next to be admitted first."""
        return tuple(self._queue)

    def usage(self) -> MemorySplit:
        """Returns how the slots of the pools are used.

        This walks all block tables: it is for reports, not for every step.
        """
        running = [sequence for group in self.running for sequence in group.unfinished]
        return self.block_manager.usage(
            {sequence.sequence_id: sequence.num_computed_tokens for sequence in running},
            {sequence.sequence_id: sequence.num_known_tokens for sequence in running},
        )

    @property
    def num_running(self) -> int:
        """Returns how many groups run."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Returns how many groups wait."""
        return len(self._queue)

    @property
    def num_swapped(self) -> int:
        """Returns how many of the waiting groups have their blocks in host memory."""
        groups = (self._groups[request_id] for request_id in self._was_preempted)
        return sum(admitting.is_swapped(group, self.block_manager) for group in groups)

    @property
    def has_sequence_slots(self) -> bool:
        """Returns whether the first waiting group fits into the sequence slots that are free."""
        group = self._queue.first()
        return group is not None and self._has_sequence_slots_for(group)

    def is_running(self, group: SequenceGroup) -> bool:
        """Returns whether a group owns blocks."""
        return group.request.request_id in self._running

    def add(self, group: SequenceGroup) -> None:
        """Takes in a new group, which waits.

        Raises:
            CapacityError: The group could not run even if it were alone.
            ValueError: The request id is in use, or the prompt is empty or as long as the request
                may become.
        """
        request = group.request
        if request.request_id in self._groups:
            raise ValueError(f"request {request.request_id!r} exists already")
        if not 0 < len(request.prompt_token_ids) < request.max_total_tokens:
            raise ValueError(
                f"request {request.request_id!r} has a prompt of {len(request.prompt_token_ids)}"
                f" tokens and may have {request.max_total_tokens} in all: it needs a token to begin"
                " with and room for one more"
            )
        refuse_what_never_fits(group, self.block_manager, self.max_num_seqs)
        self._num_arrivals += 1
        group.arrival = self._num_arrivals
        self._groups[request.request_id] = group
        self._queue.add(group)
        for sequence in group.sequences:
            self.sequences[sequence.sequence_id] = (group, sequence)

    def abort(self, request_id: str, reason: str) -> SequenceGroup | None:
        """Ends a group in whatever state it is, and gives its blocks back at once.

        Returns:
            The group, or None if there is none with this id any more.
        """
        group = self._groups.get(request_id)
        if group is None:
            return None
        self._give_blocks_back(group)
        for sequence in group.unfinished:
            sequence.finish_reason = reason
        # Before the samples are added: their ids are not in `sequences`.
        self.remove(group)
        # The samples that the first draw would have forked end with it.
        first = group.sequences[0]
        group.sequences += [
            replace(first, sequence_id=child_id, sample_index=index)
            for index, child_id in enumerate(group.pending_forks, start=1)
        ]
        return group

    def remove(self, group: SequenceGroup) -> None:
        """Lets go of a group whose sequences have given their blocks back."""
        request_id = group.request.request_id
        del self._groups[request_id]
        self._was_preempted.discard(request_id)
        if self._running.pop(request_id, None) is not None:
            self._num_sequence_slots -= group.request.num_sequences
        else:
            self._queue.remove(group)
        for sequence in group.sequences:
            del self.sequences[sequence.sequence_id]

    def served(self, group: SequenceGroup) -> None:
        """Notes that a group was given a token of output."""
        self._queue.served(group, 1)

    def admit_next(self, step: PlanBuilder) -> SequenceGroup | None:
        """Moves the first waiting group to the running ones if there is room for all that it knows.

        Returns:
            The group, or None if nothing waits or the first group has no room.
        """
        group = self._queue.first()
        if group is None or not self._may_run(group) or not self._give_blocks(group, step):
            return None
        step.num_admitted += 1
        self._queue.remove(group)
        if not group.num_preemptions:
            self._num_admissions += 1
            group.admission = self._num_admissions
            num_tokens = sum(sequence.num_pending_tokens for sequence in group.unfinished)
            self._queue.admitted(group, num_tokens)
        self._run(group)
        self._num_sequence_slots += group.request.num_sequences
        return group

    def _may_run(self, group: SequenceGroup) -> bool:
        """Returns whether a group can be admitted, blocks left aside."""
        if not self._has_sequence_slots_for(group) or not self._has_adapter_slot_for(group):
            return False
        waits_for_completion = self._preemption.new_wait_until == "completed"
        is_held_up = waits_for_completion and self._was_preempted and self._running
        return group.num_preemptions > 0 or not is_held_up

    def _has_sequence_slots_for(self, group: SequenceGroup) -> bool:
        return self._num_sequence_slots + group.request.num_sequences <= self.max_num_seqs

    def _has_adapter_slot_for(self, group: SequenceGroup) -> bool:
        """Returns whether the adapters of the running groups and this one fit on the device."""
        if group.request.lora is None:
            return True
        adapters = (running.request.lora for running in self._running.values())
        digests = {adapter.digest for adapter in adapters if adapter}
        return len(digests | {group.request.lora.digest}) <= self._max_loras

    def _give_blocks(self, group: SequenceGroup, step: PlanBuilder) -> bool:
        """Begins a group's block tables; returns False if there are too few free blocks."""
        manager = self.block_manager
        spare = partial(
            spare_blocks,
            num_running=self._num_sequence_slots,
            num_joining=group.request.num_sequences,
            resumes=group.num_preemptions > 0,
        )
        if admitting.is_swapped(group, manager):
            if not manager.fits(admitting.blocks_to_swap_in(group, manager), spare):
                return False
            admitting.admit_swapped(group, manager, step)
            return True
        for hits in admitting.beginnings(group, manager):
            if manager.fits(admitting.blocks_to_admit(hits, manager), spare):
                admitting.admit_with_hits(group, hits, manager, step, self.prefix_counts)
                return True
        return False

    def _run(self, group: SequenceGroup) -> None:
        """Puts a group among the running ones, at its rank: mostly it is the last."""
        last = next(reversed(self._running.values()), None)
        self._running[group.request.request_id] = group
        rank = self._queue.rank
        if last is not None and rank(group) < rank(last):
            self._running = dict(sorted(self._running.items(), key=lambda item: rank(item[1])))

    def preempt_last(self, step: PlanBuilder | None) -> SequenceGroup:
        """Takes the blocks of the running group that ranks last, and puts it back to the queue.

        Args:
            step: The step that is planned. Outside of a step, where it is None, nothing is swapped.
        """
        return self._preempt(next(reversed(self._running)), step)

    def _preempt(self, request_id: str, step: PlanBuilder | None) -> SequenceGroup:
        group = self._running.pop(request_id)
        self._num_sequence_slots -= group.request.num_sequences
        if step is not None and self._swap_out(group, step):
            self.num_preemptions["swap"] += 1
        else:
            self._give_blocks_back(group)
            self.num_preemptions["recompute"] += 1
        self._queue.put_back(group)
        self._was_preempted.add(request_id)
        group.num_preemptions += 1
        if step is not None:
            step.preempted.append(request_id)
        return group

    def start_over(
        self, chosen: Callable[[SequenceGroup], bool] = lambda group: True
    ) -> tuple[str, ...]:
        """Has the chosen groups compute all their tokens again, the swapped ones included.

        Returns:
            The ids of the requests among them that ran.
        """
        running = [request_id for request_id, group in self._running.items() if chosen(group)]
        # The one that ranks last comes first, as `put_back` wants it.
        for request_id in reversed(running):
            self._preempt(request_id, None)
        # Those that wait may have computed blocks in host memory.
        for request_id in self._was_preempted:
            if chosen(group := self._groups[request_id]) and request_id not in self._running:
                self._give_blocks_back(group)
        return tuple(running)

    def replace_weights(self, version: int, *, recomputes: bool) -> tuple[str, ...]:
        """Has the tokens of all groups from here on be drawn by other weights.

        What must come from one set of weights starts over in any case: a prefix that is computed
        for a pin, and a prompt whose tokens are scored.

        Args:
            version: The version of the new weights.
            recomputes: True has all groups start over.

        Returns:
            The ids of the requests that ran and start over.
        """
        for group in self._groups.values():
            for sequence in group.unfinished:
                sequence.goes_on_with(version)
        preempted = self.start_over(
            lambda group: recomputes or group.request.is_prefix or group.num_unscored > 0
        )
        for group in self._groups.values():
            if group.num_unscored:
                group.prompt_logprobs.clear()
        return preempted

    def _swap_out(self, group: SequenceGroup, step: PlanBuilder) -> bool:
        """Moves the computed blocks of a group to host memory.

        Returns:
            False if the settings do not want it, nothing is computed, or there is no room.
        """
        manager = self.block_manager
        sequences = group.unfinished
        if not self._preemption.swaps(len(sequences)):
            return False
        if not any(sequence.num_computed_tokens for sequence in sequences):
            return False
        for sequence in sequences:
            manager.slide(sequence.sequence_id, sequence.num_computed_tokens)
            manager.trim(sequence.sequence_id, sequence.num_computed_tokens)
        sequence_ids = [sequence.sequence_id for sequence in sequences]
        if not manager.can_swap_out(sequence_ids):
            return False
        step.swap_out += manager.swap_out(sequence_ids)
        return True

    def _give_blocks_back(self, group: SequenceGroup) -> None:
        """Gives up what is computed of a group, on the device and in host memory."""
        manager = self.block_manager
        for sequence in reversed(group.unfinished):
            if manager.is_swapped(sequence.sequence_id):
                manager.drop_swapped(sequence.sequence_id)
            elif sequence.sequence_id in manager.sequence_ids:
                manager.release(sequence.sequence_id)
            sequence.num_computed_tokens = 0

    def check(self) -> None:
        """Asserts that order, slots and blocks are what they have to be between two steps."""
        self.block_manager.check()
        self._check_order()
        for group in self._groups.values():
            _check_group(group)
        self._check_blocks()

    def _check_order(self) -> None:
        waiting = list(self._queue)
        groups = [*self._running.values(), *waiting]
        ranks = [self._queue.rank(group) for group in self._running.values()]
        assert ranks == sorted(ranks), "running groups are not in order of rank"
        assert len(groups) == len(self._groups), "a group is lost, or there twice"
        assert {id(group) for group in groups} == {id(group) for group in self._groups.values()}
        assert len(self._queue) == len(waiting), "the queue counts wrong"
        assert not waiting or waiting[0] is self._queue.first(), "the first is not first"
        preempted = {group.request.request_id for group in groups if group.num_preemptions}
        assert preempted == self._was_preempted, "preempted groups are not those that are noted"
        num_sequences = sum(group.request.num_sequences for group in self._running.values())
        assert self._num_sequence_slots == num_sequences <= self.max_num_seqs, "too many sequences"
        sequences = {id(sequence) for group in groups for sequence in group.sequences}
        noted = {id(sequence) for _, sequence in self.sequences.values()}
        assert sequences == noted, "sequences are not those that are noted"

    def _check_blocks(self) -> None:
        """Asserts that exactly the running sequences and the pins have blocks."""
        manager = self.block_manager
        running = [sequence for group in self._running.values() for sequence in group.unfinished]
        owners = {sequence.sequence_id for sequence in running} | manager.pins.keys()
        assert owners == set(manager.sequence_ids), "blocks belong to others than those that run"
        for sequence in running:
            name = f"sequence {sequence.sequence_id}"
            tables = manager.block_tables(sequence.sequence_id)
            num_slots = len(tables[0]) * manager.block_size
            assert sequence.num_computed_tokens < sequence.num_known_tokens, f"{name} is idle"
            assert sequence.num_computed_tokens <= num_slots, f"{name} outgrew its block table"
            if manager.index is not None:
                self._check_prefix(sequence, manager.index)
        num_swapped = 0
        for sequence in [sequence for group in self._queue for sequence in group.unfinished]:
            num_blocks = manager.blocks_for(sequence.num_computed_tokens)
            if manager.is_swapped(sequence.sequence_id):
                num_swapped += 1
                host_tables = manager.host_tables(sequence.sequence_id)
                assert all(len(table) == num_blocks for table in host_tables), "host tables differ"
            else:
                assert num_blocks == 0, "a waiting sequence has computed tokens and no blocks"
        assert num_swapped == manager.num_swapped, "a sequence outside of the queue is swapped"

    def _check_prefix(self, sequence: Sequence, index: PrefixIndex) -> None:
        """Asserts that a sequence's cached blocks hold its tokens, and that these are computed.

        No later step writes to a block whose tokens are all computed. The token that follows a
        block is another one where a fork cached a block that both share; see `PrefixIndex`.
        """
        manager = self.block_manager
        name = f"sequence {sequence.sequence_id}"
        num_full = sequence.num_computed_tokens // manager.block_size
        content_ids = sequence.content_ids
        table = manager.groups[0].tables[sequence.sequence_id]
        for number, block in enumerate(table.blocks):
            if block in index:
                assert number < num_full, f"{name} will write into the cached block {block}"
                num_own = None if number < table.num_cached else manager.block_size
                known = index.entry(block).token_ids[:num_own]
                content = index.content(content_ids, number)[:num_own]
                assert known == content, f"{name}: block {block} lies"


def _check_group(group: SequenceGroup) -> None:
    request = group.request
    assert group.unfinished, f"request {request.request_id!r} is finished and still scheduled"
    if group.num_unscored:
        num_computed = max(sequence.num_computed_tokens for sequence in group.sequences)
        assert num_computed <= len(group.prompt_logprobs), "a token of the prompt was passed over"
    is_admitted = len(group.unfinished) <= request.num_sequences
    assert is_admitted, "more sequences than were admitted"
    for sequence in group.unfinished:
        fits = sequence.num_known_tokens < request.max_total_tokens
        assert fits, "a sequence outgrew its request"


class SeveralSteps:
    """Counts the steps since the last arrival, where each decode step of an executable counts."""

    def __init__(self, limits: StepLimits) -> None:
        """Begins to count.

        Args:
            limits: The limits of steps.
        """
        self._limits = limits
        self._num_quiet_steps = 0

    def note_arrival(self) -> None:
        """Notes that a request has come."""
        self._num_quiet_steps = 0

    def count_step(self, step: PlanBuilder) -> None:
        """Counts a step that was planned."""
        lengths = [len(draft.token_ids) for draft in step.drafts.values()]
        self._num_quiet_steps += 1 + max(lengths, default=0)

    def choose(self, step: PlanBuilder, requests: RunningSet) -> int:
        """Returns how many decode steps the executable of a step may run.

        Where that adapts, it is one while anybody waits for the end of a step: a request in the
        queue, one that was preempted or swapped out, or one whose prompt is not computed yet.
        """
        maximum = self._limits.num_steps
        if not self._limits.adapts_num_steps:
            return maximum
        if requests.num_waiting or step.preempted or step.num_admitted:
            return 1
        if len({id(group) for group, _, _ in step.work}) < requests.num_running:
            return 1  # the prompts of the others are computed in the next step
        return min(maximum, self._num_quiet_steps // STEPS_FOR_ONE_MORE)
