"""Who runs, who waits and who is preempted: the groups of a scheduler, their order, and the blocks that they hold for it."""

from __future__ import annotations

from functools import partial

from jaxpage.errors import CapacityError
from jaxpage.memory import BlockManager, Counts, MemorySplit, Pin
from jaxpage.scheduling import admitting
from jaxpage.scheduling.admitting import PrefixCounts
from jaxpage.scheduling.plan_builder import PlanBuilder
from jaxpage.scheduling.policy import Preemption, spare_blocks
from jaxpage.scheduling.queues import ByPriority, FirstCome, WaitingQueue
from jaxpage.step.limits import StepLimits
from jaxpage.step.request import Sequence, SequenceGroup


class RunningSet:
    """All groups that are not finished: the running ones, which own blocks, and the queue of the others.

    A group is admitted, preempted and resumed whole. Blocks for all that it knows are reserved when it is admitted, so that only
    decoding can run short of blocks; then the running group of the highest rank is preempted, and recomputes or is swapped. The one of
    the lowest rank never does: add() has refused what cannot fit alone. The queue decides the ranks and the order of admission; no group
    is admitted out of that order. A group begins with the cached or pinned blocks of its longest known prefix; cached blocks are free
    blocks to all other groups.
    """

    def __init__(
        self,
        limits: StepLimits,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        queue: WaitingQueue | None = None,
        preemption: Preemption | None = None,
        max_loras: int = 0,
    ) -> None:
        """
        Args:
            max_loras: most LoRA adapters that the running groups may have.

        Raises ValueError unless a step holds a token of each of `max_num_seqs` sequences.
        """
        if not 1 <= max_num_seqs <= limits.max_rows:
            raise ValueError(f"{max_num_seqs=} must be between 1 and the {limits.max_rows} rows of a step")
        self.limits = limits
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_loras = max_loras
        self.preemption = preemption or Preemption()
        self.num_preemptions = {"recompute": 0, "swap": 0}
        self.prefix_counts = PrefixCounts()
        self._groups: dict[str, SequenceGroup] = {}  # all that are not finished, in order of arrival
        self._running: dict[str, SequenceGroup] = {}  # those that own blocks, in order of rank
        self._queue: WaitingQueue = FirstCome() if queue is None else queue  # the others
        self._was_preempted: set[str] = set()  # who was preempted at least once and has not finished
        self._sequences: dict[int, tuple[SequenceGroup, Sequence]] = {}
        self._num_sequence_slots = 0  # sequences that the running groups can have
        self._num_arrivals = self._num_admissions = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._groups)

    @property
    def has_priorities(self) -> bool:
        """Whether the policy looks at the priority of requests."""
        return isinstance(self._queue, ByPriority)

    @property
    def running(self) -> tuple[SequenceGroup, ...]:
        """The groups that own blocks, the lowest rank first."""
        return tuple(self._running.values())

    @property
    def waiting(self) -> tuple[SequenceGroup, ...]:
        """The groups that own no block of the pool, the next to be admitted first."""
        return tuple(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def has_sequence_slots(self) -> bool:
        """Whether some group waits that could run, if there are blocks for it."""
        group = self._queue.first()
        return group is not None and self._num_sequence_slots + group.request.num_sequences <= self.max_num_seqs

    @property
    def num_swapped(self) -> int:
        """How many of the waiting groups have blocks in host memory."""
        return sum(
            admitting.is_swapped(self._groups[request_id], self.block_manager) for request_id in self._was_preempted
        )

    def usage(self) -> MemorySplit:
        """What the slots of the pool hold. Walks all block tables: for reports, not for every step."""
        running = [sequence for group in self._running.values() for sequence in group.unfinished]
        return self.block_manager.usage(
            {sequence.sequence_id: sequence.num_computed_tokens for sequence in running},
            {sequence.sequence_id: sequence.num_known_tokens for sequence in running},
        )

    def add(self, group: SequenceGroup) -> None:
        """Takes a new group in.

        Raises:
            CapacityError: the group could never run, not even alone.
            ValueError: the id is in use, or the prompt is empty or leaves no room for a token.
        """
        request = group.request
        if request.request_id in self._groups:
            raise ValueError(f"request {request.request_id!r} exists already")
        if not 0 < len(request.prompt_token_ids) < request.max_total_tokens:
            raise ValueError(
                f"request {request.request_id!r} has a prompt of {len(request.prompt_token_ids)} tokens and may have"
                f" {request.max_total_tokens} in all: it needs a token to begin with and room for one more"
            )
        self._refuse_what_never_fits(group)
        self._num_arrivals += 1
        group.arrival = self._num_arrivals
        self._groups[request.request_id] = group
        self._queue.add(group)
        for sequence in group.sequences:
            self._sequences[sequence.sequence_id] = (group, sequence)

    def _refuse_what_never_fits(self, group: SequenceGroup) -> None:
        request, manager = group.request, self.block_manager
        width = request.num_sequences
        if width > self.max_num_seqs:
            raise CapacityError(
                f"request {request.request_id!r} asks for {width} sequences at once; max_num_seqs is {self.max_num_seqs}"
            )
        for needed, num_pinned, tables in zip(
            self._most_blocks(group), manager.num_pinned_blocks, manager.groups, strict=True
        ):
            if needed > tables.pool.num_usable - num_pinned:
                pinned = f", of which {num_pinned} are pinned" if num_pinned else ""
                raise CapacityError(
                    f"request {request.request_id!r} may need {needed} KV blocks ({width} x {request.max_total_tokens} tokens in"
                    f" blocks of {manager.block_size}); the pool has {tables.pool.num_usable}{pinned}. Ask for fewer tokens, or give"
                    " the engine more blocks (num_blocks, kv_cache_memory_bytes)"
                )

    def _most_blocks(self, group: SequenceGroup) -> Counts:
        """The blocks that a group may need when it runs alone, beside the pins. What it shares otherwise does not count: a
        recomputed group shares nothing."""
        request, manager = group.request, self.block_manager
        blocks = manager.most_blocks(request.max_total_tokens - 1)  # the last token is drawn and never computed
        num_pinned = 0
        if request.params.prompt_logprobs is None:  # else it computes all of its prompt, whatever is pinned of it
            prefix = manager.find_pinned(request.prompt_token_ids, request.prefix_salt)
            num_pinned = prefix.num_tokens // manager.block_size
        return tuple(
            request.num_sequences * count - (num_pinned if tables.sliding_window is None else 0)
            for count, tables in zip(blocks, manager.groups, strict=True)
        )

    def abort(self, request_id: str, reason: str = "abort") -> SequenceGroup | None:
        """Ends a group in whatever state it is, and gives its blocks back at once. None: there is no such group any more."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        self._give_blocks_back(group)
        for sequence in group.unfinished:
            sequence.finish_reason = reason
        self._forget(group)
        return group

    def _admit(self, group: SequenceGroup, step: PlanBuilder) -> bool:
        """Moves a waiting group to the running ones if there is room for all that is known of it."""
        manager, width = self.block_manager, group.request.num_sequences
        resumes = group.num_preemptions > 0
        if self._num_sequence_slots + width > self.max_num_seqs:
            return False
        if not self._has_adapter_slot(group):
            return False
        if self.preemption.new_wait_until == "completed" and self._was_preempted and self._running and not resumes:
            return False
        spare = partial(spare_blocks, num_running=self._num_sequence_slots, num_joining=width, resumes=resumes)
        if admitting.is_swapped(group, manager):
            if not manager.fits(admitting.blocks_to_swap_in(group, manager), spare):
                return False
            admitting.admit_swapped(group, manager, step)
        else:
            beginnings = admitting.beginnings(group, manager)
            fitting = (hits for hits in beginnings if manager.fits(admitting.blocks_to_admit(hits, manager), spare))
            if (hits := next(fitting, None)) is None:
                return False
            admitting.admit_with_hits(group, hits, manager, step, self.prefix_counts)
        step.num_admitted += 1
        self._queue.remove(group)
        if not resumes:
            self._num_admissions += 1
            group.admission = self._num_admissions
            self._queue.admitted(group, sum(sequence.num_pending_tokens for sequence in group.sequences))
        self._run(group)
        self._num_sequence_slots += width
        return True

    def _has_adapter_slot(self, group: SequenceGroup) -> bool:
        """Whether the running groups have no more adapters with the group's than may be on the device at once."""
        if group.request.lora is None:
            return True
        digests = {running.request.lora.digest for running in self._running.values() if running.request.lora}
        return len(digests | {group.request.lora.digest}) <= self.max_loras

    def _run(self, group: SequenceGroup) -> None:
        """Puts a group among the running ones, at its rank: mostly the highest."""
        last = next(reversed(self._running.values()), None)
        self._running[group.request.request_id] = group
        if last is not None and self._queue.rank(group) < self._queue.rank(last):
            self._running = dict(sorted(self._running.items(), key=lambda item: self._queue.rank(item[1])))

    def _preempt_last(self, step: PlanBuilder | None) -> SequenceGroup:
        """The running group of the highest rank gives its blocks up and goes back to the queue. Outside of a step nothing is swapped."""
        request_id, group = self._running.popitem()
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

    def _swap_out(self, group: SequenceGroup, step: PlanBuilder) -> bool:
        """Moves what is computed of a group to host memory, if the mode wants it and there is room."""
        manager, sequences = self.block_manager, group.unfinished
        if not self.preemption.swaps(len(sequences)) or not any(s.num_computed_tokens for s in sequences):
            return False
        for sequence in sequences:
            manager.slide(sequence.sequence_id, sequence.num_computed_tokens)
            manager.trim(sequence.sequence_id, sequence.num_computed_tokens)
        sequence_ids = [sequence.sequence_id for sequence in sequences]
        if not manager.can_swap_out(sequence_ids):
            return False
        step.swap_out += manager.swap_out(sequence_ids)
        return True

    def preempt_all(self) -> None:
        """Every group starts over, the swapped ones included: after a step that was planned and did not happen."""
        while self._running:
            self._preempt_last(None)
        for request_id in self._was_preempted:
            self._give_blocks_back(self._groups[request_id])

    def lose_pages(self) -> None:
        """What was in the blocks is gone: every group starts over, nothing is cached and nothing pinned."""
        self.preempt_all()
        for pin_id in list(self.block_manager.pins):
            self.block_manager.unpin(pin_id)
        self.block_manager.forget_cached()

    def _give_blocks_back(self, group: SequenceGroup) -> None:
        """What is computed of a group is given up, wherever it lies."""
        manager = self.block_manager
        for sequence in reversed(group.unfinished):
            if manager.is_swapped(sequence.sequence_id):
                manager.drop_swapped(sequence.sequence_id)
            elif sequence.sequence_id in manager.sequence_ids:
                manager.release(sequence.sequence_id)
            sequence.num_computed_tokens = 0

    def _forget(self, group: SequenceGroup) -> None:
        request_id = group.request.request_id
        del self._groups[request_id]
        self._was_preempted.discard(request_id)
        if self._running.pop(request_id, None) is not None:
            self._num_sequence_slots -= group.request.num_sequences
        else:
            self._queue.remove(group)
        for sequence in group.sequences:
            del self._sequences[sequence.sequence_id]

    def pin(self, pin_id: int, request_id: str) -> SequenceGroup:
        """Ends a running request whose prompt is computed, and keeps the prompt in place until `block_manager.unpin(pin_id)`.

        Raises:
            CapacityError: another request that is waiting or running could then not run alone any more. Nothing has changed.
        """
        manager, group = self.block_manager, self._running[request_id]
        prompt, salt = group.request.prompt_token_ids, group.request.prefix_salt
        sequence = group.unfinished[0]
        assert sequence.num_computed_tokens >= len(prompt), "the prompt is not computed yet"
        manager.pin(pin_id, sequence.sequence_id, Pin(prompt, salt))
        usable = [tables.pool.num_usable for tables in manager.groups]
        left = [total - pinned for total, pinned in zip(usable, manager.num_pinned_blocks, strict=True)]
        for other in self._groups.values():
            for needed, room, total in zip(self._most_blocks(other), left, usable, strict=True):
                if other is not group and needed > room:
                    manager.unpin(pin_id)
                    raise CapacityError(
                        f"a prefix of {len(prompt)} tokens cannot be pinned now: request {other.request.request_id!r} may need"
                        f" {needed} KV blocks, and {room} of {total} would be left"
                    )
        self.abort(request_id)
        return group

    def check(self) -> None:
        """Asserts what holds between steps: order, sequence slots, and blocks for exactly the running sequences."""
        manager, waiting = self.block_manager, list(self._queue)
        manager.check()
        groups = [*self._running.values(), *waiting]
        ranks = [self._queue.rank(group) for group in self._running.values()]
        assert ranks == sorted(ranks), "running groups are not in order of rank"
        assert {id(g) for g in groups} == {id(g) for g in self._groups.values()} and len(groups) == len(self._groups)
        assert len(self._queue) == len(waiting)
        assert not waiting or waiting[0] is self._queue.first(), "the first is not first"
        assert {g.request.request_id for g in groups if g.num_preemptions} == self._was_preempted
        num_sequences = sum(group.request.num_sequences for group in self._running.values())
        assert self._num_sequence_slots == num_sequences <= self.max_num_seqs
        assert {id(s) for _, s in self._sequences.values()} == {id(s) for group in groups for s in group.sequences}
        running = {s.sequence_id: s for group in self._running.values() for s in group.unfinished}
        assert {*running, *manager.pins} == set(manager.sequence_ids), "blocks belong to the running sequences and pins"
        for sequence_id, sequence in running.items():
            num_slots = len(manager.block_tables(sequence_id)[0]) * manager.block_size
            assert sequence.num_computed_tokens < sequence.num_known_tokens, f"sequence {sequence_id} has nothing to do"
            assert sequence.num_computed_tokens <= num_slots, f"sequence {sequence_id} outgrew its block table"
            self._check_prefix(sequence)
        for group in groups:
            assert group.unfinished, f"request {group.request.request_id!r} is finished and still scheduled"
            if group.num_unscored:
                num_computed = max(sequence.num_computed_tokens for sequence in group.sequences)
                assert num_computed <= len(group.prompt_logprobs), "a token of the prompt was passed over"
            assert len(group.unfinished) <= group.request.num_sequences, "more sequences than were admitted"
            for sequence in group.unfinished:
                assert sequence.num_known_tokens < group.request.max_total_tokens, "a sequence outgrew its request"
        for sequence in [sequence for group in waiting for sequence in group.unfinished]:
            tables = manager.host_tables(sequence.sequence_id) if manager.is_swapped(sequence.sequence_id) else [[]]
            num_blocks = manager.blocks_for(sequence.num_computed_tokens)
            assert all(len(table) == num_blocks for table in tables), "what waits has what is swapped"
        num_swapped = sum(manager.is_swapped(s.sequence_id) for group in waiting for s in group.unfinished)
        assert num_swapped == manager.num_swapped, "a sequence outside of the queue is swapped"

    def _check_prefix(self, sequence: Sequence) -> None:
        """The cached blocks of a sequence hold its tokens, and all of those tokens are computed, so no later step writes there."""
        manager = self.block_manager
        if manager.cached is None:
            return
        index = manager.cached.index
        num_full = sequence.num_computed_tokens // manager.block_size
        for place, block in enumerate(manager.block_tables(sequence.sequence_id)[0]):
            if block in index:
                assert place < num_full, f"sequence {sequence.sequence_id} will write into the cached block {block}"
                start = place * manager.block_size
                tokens = tuple(sequence.token_ids[start : start + manager.block_size])
                assert index.entry(block).token_ids == tokens, f"sequence {sequence.sequence_id}: block {block} lies"
