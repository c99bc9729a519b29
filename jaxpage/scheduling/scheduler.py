"""Continuous batching over paged memory: which requests run, which wait, who gives way; the one place where sequences change."""

from __future__ import annotations

from collections.abc import Iterable

from jaxpage.decoding.edits import Edit
from jaxpage.errors import CapacityError
from jaxpage.memory import BlockManager, MemorySplit
from jaxpage.request import Sequence, SequenceGroup
from jaxpage.scheduling.committing import apply_edit
from jaxpage.scheduling.draft import Draft
from jaxpage.scheduling.plan import StepPlan
from jaxpage.scheduling.policy import StepLimits, num_sequences, watermark_blocks
from jaxpage.scheduling.prefix_hits import PrefixCounts, adopt_hits, blocks_to_admit, find_hits
from jaxpage.scheduling.queue import FirstComeQueue

Members = tuple[SequenceGroup, list[Sequence]]  # a group and those of its sequences that are not finished
Copies = list[tuple[int, int]]  # (source block, destination block)


def decodes(sequences: list[Sequence]) -> bool:
    """Whether each sequence of a group has one token left to compute."""
    return all([sequence.num_pending_tokens == 1 for sequence in sequences])


class Scheduler:
    """Plans steps and commits what came of them.

    There are no phases: a sequence has tokens known and tokens computed, and is given work so that the second catches up.
    Running groups are older than waiting ones. A group runs whole: with one token left for each of its sequences it decodes,
    all sequences in the same step; before that it computes its prompt, or after a preemption all its tokens, in chunks.
    Blocks for all known tokens are reserved when a group is admitted, so that only decoding can run short of blocks; then
    the newest running group gives way and recomputes later. The oldest never does: add() has refused what cannot fit alone.
    A group begins with the cached blocks of its longest known prefix; cached blocks are free blocks to everybody else.
    """

    def __init__(self, limits: StepLimits, block_manager: BlockManager, *, max_num_seqs: int) -> None:
        """Raises ValueError unless a step holds a token of each of `max_num_seqs` sequences."""
        if not 1 <= max_num_seqs <= limits.max_rows:
            raise ValueError(f"{max_num_seqs=} must be between 1 and the {limits.max_rows} rows of a step")
        self.limits = limits
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.num_preemptions = 0
        self.prefix_counts = PrefixCounts()
        self._groups: dict[str, SequenceGroup] = {}  # all that are not finished, in order of arrival
        self._running: dict[str, SequenceGroup] = {}  # the oldest of them, in order of arrival
        self._queue = FirstComeQueue()  # the others
        self._sequences: dict[int, tuple[SequenceGroup, Sequence]] = {}
        self._num_seats = 0  # sequences that the running groups can have
        self._last_was_chunk = False
        self._num_steps = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._groups)

    @property
    def running(self) -> tuple[SequenceGroup, ...]:
        """The groups that own blocks, the oldest first."""
        return tuple(self._running.values())

    @property
    def waiting(self) -> tuple[SequenceGroup, ...]:
        """The groups that own nothing, the next to be admitted first."""
        return tuple(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def usage(self) -> MemorySplit:
        """What the slots of the pool hold. Walks all block tables: for reports, not for every step."""
        running = [sequence for group in self._running.values() for sequence in group.unfinished]
        return self.block_manager.usage(
            {sequence.sequence_id: sequence.num_computed_tokens for sequence in running},
            {sequence.sequence_id: sequence.num_known_tokens for sequence in running},
        )

    def add(self, group: SequenceGroup) -> None:
        """Takes a new group in, behind all others.

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
        self._groups[request.request_id] = group
        self._queue.add(group)
        for sequence in group.sequences:
            self._sequences[sequence.sequence_id] = (group, sequence)

    def _refuse_what_never_fits(self, group: SequenceGroup) -> None:
        request, manager = group.request, self.block_manager
        width = num_sequences(request)
        if width > self.max_num_seqs:
            raise CapacityError(
                f"request {request.request_id!r} asks for {width} sequences at once; max_num_seqs is {self.max_num_seqs}"
            )
        # The last token is drawn and never computed. Shared blocks do not count: a recomputed group shares nothing.
        needed = width * manager.blocks_for(request.max_total_tokens - 1)
        if needed > manager.pool.num_usable:
            raise CapacityError(
                f"request {request.request_id!r} may need {needed} KV blocks ({width} x {request.max_total_tokens} tokens in"
                f" blocks of {manager.block_size}); the pool has {manager.pool.num_usable}. Ask for fewer tokens, or give the"
                " engine more blocks (num_blocks, kv_cache_memory_bytes)"
            )

    def abort(self, request_id: str, reason: str = "abort") -> SequenceGroup | None:
        """Ends a group in whatever state it is, and gives its blocks back at once. None: there is no such group any more."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        if request_id in self._running:
            self._give_blocks_back(group)
        for sequence in group.unfinished:
            sequence.finish_reason = reason
        self._forget(group)
        return group

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do. Reserves its blocks; changes no sequence but those it preempts."""
        draft = Draft()
        decoding, computing = self._divide()
        num_decoding = sum(len(sequences) for _, sequences in decoding)
        if self.limits.holds_chunks_beside(num_decoding):
            self._plan_decoding(draft, decoding)
            self._plan_chunks(draft, computing)
        elif self._last_was_chunk:
            self._plan_decoding(draft, decoding)
            self._last_was_chunk = False
        if not draft.work:
            self._plan_chunks(draft, computing)
            self._last_was_chunk = bool(draft.work)
        if not draft.work:
            decoding, _ = self._divide()  # once more: who was just admitted with one token per sequence decodes
            self._plan_decoding(draft, decoding)
        if not draft.work:
            assert not self._groups, "there are unfinished groups, and none can run"
            return None
        self._num_steps += 1
        return draft.freeze(self._num_steps, self.block_manager)

    def _divide(self) -> tuple[list[Members], list[Members]]:
        """The running groups with their unfinished sequences: those that decode, and those with more to compute."""
        decoding: list[Members] = []
        computing: list[Members] = []
        for group in self._running.values():
            sequences = group.unfinished
            (decoding if decodes(sequences) else computing).append((group, sequences))
        return decoding, computing

    def _plan_decoding(self, draft: Draft, decoding: list[Members]) -> None:
        """One token for every sequence that decodes, the oldest first; the newest groups give way when blocks run out."""
        for group, sequences in decoding:
            if draft.preempted and group.request.request_id not in self._running:
                return  # gave way, and with it all newer ones
            copies = self._make_room(group, sequences, draft)
            if copies is None:
                return
            draft.copies += copies
            for sequence in sequences:
                draft.compute(group, sequence, 1)

    def _make_room(self, group: SequenceGroup, sequences: list[Sequence], draft: Draft) -> Copies | None:
        """Reserves a token for each sequence of the group and returns the copies to make; None: the group itself gave way."""
        manager = self.block_manager
        copies: Copies = []
        for sequence in sequences:
            sequence_id, start = sequence.sequence_id, sequence.num_computed_tokens
            while (num_new := manager.num_new_blocks(sequence_id, start, start + 1)) > manager.pool.num_free:
                if self._preempt_newest(draft) is group:
                    return None
            if num_new:
                copies += manager.reserve(sequence_id, start, start + 1)
        return copies

    def _plan_chunks(self, draft: Draft, computing: list[Members]) -> None:
        """Tokens for the running groups that do not decode yet, then for those that can be admitted, up to the step's limits.

        Who comes first takes all it can. Only who found all but the last token in the cache decodes before an older group does.
        """
        for group, sequences in computing:
            if not draft.preempted or group.request.request_id in self._running:
                self._add_chunks(draft, group, sequences)
        has_decoding = False
        while not draft.preempted and self._has_room(draft):
            newcomer = self._queue.first()
            if newcomer is None or not self._admit(newcomer, draft):
                return
            sequences = newcomer.unfinished
            if sequences[0].num_computed_tokens and decodes(sequences):
                has_decoding = True  # all but the last token was cached
            elif has_decoding and not draft.work:
                return  # who is older decodes first; the newcomer's turn comes next
            else:
                self._add_chunks(draft, newcomer, sequences)

    def _has_room(self, draft: Draft) -> bool:
        return draft.num_tokens < self.limits.max_tokens and draft.num_rows < self.limits.max_chunk_rows

    def _add_chunks(self, draft: Draft, group: SequenceGroup, sequences: list[Sequence]) -> None:
        # Sequences of one group draw in the same step or not at all: the last token waits until each has one left.
        num_kept = 1 if len(sequences) > 1 else 0
        for sequence in sequences:
            num_tokens = min(sequence.num_pending_tokens - num_kept, self.limits.max_tokens - draft.num_tokens)
            if num_tokens > 0 and self._has_room(draft):
                draft.compute(group, sequence, num_tokens)

    def _admit(self, group: SequenceGroup, draft: Draft) -> bool:
        """Moves a waiting group to the running ones if there is room for all that is known of it."""
        manager, width = self.block_manager, num_sequences(group.request)
        if self._num_seats + width > self.max_num_seqs:
            return False
        hits = find_hits(group, manager)
        spare = watermark_blocks(manager.pool.num_usable) if self._running else 0
        if blocks_to_admit(hits, manager) + spare > manager.pool.num_free:
            return False
        adopt_hits(group, hits, manager, self.prefix_counts)
        for sequence in group.unfinished:
            start, stop = sequence.num_computed_tokens, sequence.num_known_tokens
            draft.copies += manager.reserve(sequence.sequence_id, start, stop)
        self._queue.remove(group.request.request_id)
        self._running[group.request.request_id] = group
        self._num_seats += width
        return True

    def _preempt_newest(self, draft: Draft | None = None) -> SequenceGroup:
        """The newest running group gives its blocks up and goes back to the queue, to compute all its tokens again."""
        request_id, group = self._running.popitem()
        self._give_blocks_back(group)
        self._num_seats -= num_sequences(group.request)
        for sequence in group.unfinished:
            sequence.num_computed_tokens = 0
        self._queue.put_back(group)
        group.num_preemptions += 1
        self.num_preemptions += 1
        if draft is not None:
            draft.preempted.append(request_id)
        return group

    def preempt_all(self) -> None:
        """Every running group starts over: after a step that was planned and did not happen."""
        while self._running:
            self._preempt_newest()

    def lose_pages(self) -> None:
        """What was in the blocks is gone: every running group starts over, and no block is found in the prefix cache."""
        self.preempt_all()
        self.block_manager.forget_cached()

    def _give_blocks_back(self, group: SequenceGroup) -> None:
        for sequence in reversed(group.unfinished):
            self.block_manager.release(sequence.sequence_id)

    def _forget(self, group: SequenceGroup) -> None:
        request_id = group.request.request_id
        del self._groups[request_id]
        if self._running.pop(request_id, None) is not None:
            self._num_seats -= num_sequences(group.request)
        else:
            self._queue.remove(request_id)
        for sequence in group.sequences:
            del self._sequences[sequence.sequence_id]

    def commit(self, plan: StepPlan, edits: Iterable[Edit]) -> list[SequenceGroup]:
        """Books a step that happened: its rows are computed, then the edits apply, in order.

        Rows and edits of groups that were aborted meanwhile are passed over.

        Returns:
            The groups that an edit touched, in the order of their first one.
        """
        block_size = self.block_manager.block_size
        for row in plan.rows:
            if row.sequence_id in self._sequences:
                group, sequence = self._sequences[row.sequence_id]
                assert sequence.num_computed_tokens == row.start, f"step {plan.step_id} is committed out of turn"
                sequence.num_computed_tokens = row.context_length
                if row.context_length // block_size > row.start // block_size:
                    self._cache(group, sequence)
        touched: dict[str, SequenceGroup] = {}
        for edit in edits:
            changed = apply_edit(edit, self._sequences, self.block_manager)
            if changed is not None:
                touched[changed.request.request_id] = changed
        for group in touched.values():
            if group.finished:
                self._forget(group)
        return list(touched.values())

    def _cache(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Another block of the sequence is full and computed: from now on others find it."""
        salt, num_computed = group.request.params.cache_salt, sequence.num_computed_tokens
        self.block_manager.cache(sequence.sequence_id, num_computed, sequence.token_ids, sequence.block_digests, salt)

    def check(self) -> None:
        """Asserts what holds between steps: order, seats, and blocks for exactly the running sequences."""
        self.block_manager.check()
        groups = [*self._running.values(), *self._queue]
        assert groups == list(self._groups.values()), "running and waiting groups are not in order of arrival"
        num_seats = sum(num_sequences(group.request) for group in self._running.values())
        assert self._num_seats == num_seats <= self.max_num_seqs
        assert {id(s) for _, s in self._sequences.values()} == {id(s) for group in groups for s in group.sequences}
        running = {s.sequence_id: s for group in self._running.values() for s in group.unfinished}
        assert set(running) == set(self.block_manager.sequence_ids), "blocks belong to exactly the running sequences"
        for sequence_id, sequence in running.items():
            num_slots = len(self.block_manager.block_table(sequence_id)) * self.block_manager.block_size
            assert sequence.num_computed_tokens < sequence.num_known_tokens, f"sequence {sequence_id} has nothing to do"
            assert sequence.num_computed_tokens <= num_slots, f"sequence {sequence_id} outgrew its block table"
            self._check_prefix(sequence)
        for group in groups:
            assert group.unfinished, f"request {group.request.request_id!r} is finished and still scheduled"
            assert len(group.unfinished) <= num_sequences(group.request), "more sequences than were admitted"
            for sequence in group.unfinished:
                assert sequence.num_known_tokens < group.request.max_total_tokens, "a sequence outgrew its request"
        assert all(s.num_computed_tokens == 0 for group in self._queue for s in group.unfinished)

    def _check_prefix(self, sequence: Sequence) -> None:
        """The cached blocks of a sequence hold its tokens, and none of them lies behind what is computed: nobody writes there."""
        manager = self.block_manager
        if (index := manager.prefix_index) is None:
            return
        num_full = sequence.num_computed_tokens // manager.block_size
        for place, block in enumerate(manager.block_table(sequence.sequence_id)):
            if block in index:
                assert place < num_full, f"sequence {sequence.sequence_id} will write into the cached block {block}"
                start = place * manager.block_size
                tokens = tuple(sequence.token_ids[start : start + manager.block_size])
                assert index.entry(block).token_ids == tokens, f"sequence {sequence.sequence_id}: block {block} lies"
