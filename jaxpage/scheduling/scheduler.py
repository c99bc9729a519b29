"""Schedules requests over paged memory: plans what each step computes, and commits what came of it.

A sequence has tokens that are known and tokens that are computed. A step gives it work so that the
second number catches up with the first; there are no phases beyond that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jaxpage.errors import CapacityError
from jaxpage.memory import BlockCounts, BlockManager, CachedBlocks, MemorySplit, Pin
from jaxpage.scheduling.admitting import Preemption, is_swapped, refuse_to_crowd_out
from jaxpage.scheduling.committing import apply_edit
from jaxpage.scheduling.plan_builder import PlanBuilder
from jaxpage.scheduling.queues import ByPriority, FirstCome, WaitingQueue
from jaxpage.scheduling.running_set import RunningSet, SeveralSteps
from jaxpage.step.draft import NO_DRAFTS, PLACEHOLDER, Draft, Drafts, chain
from jaxpage.step.edits import Append, Edit, Score
from jaxpage.step.limits import StepLimits
from jaxpage.step.plan import Row, StepPlan
from jaxpage.step.request import Sequence, SequenceGroup

# A group, and those of its sequences that are not finished.
Members = tuple[SequenceGroup, list[Sequence]]


def decodes(sequences: list[Sequence]) -> bool:
    """Returns whether each sequence of a group has exactly one token left to compute."""
    return all(
        # `num_pending_tokens` written out: this runs for every sequence in every step.
        [len(sequence.token_ids) - sequence.num_computed_tokens == 1 for sequence in sequences]
    )


def _cut_chunk(sequence: Sequence, num_tokens: int, room: int) -> int:
    """Returns how many tokens, at most `room`, a chunk has that cuts no whole span.

    A sequence whose last token ends such a span computes that one, too: a step that takes vectors
    has room for the draws of all samples.
    """
    assert sequence.embedded is not None
    start = sequence.num_computed_tokens
    end = sequence.embedded.end_of_whole(start + num_tokens - 1) if num_tokens else start
    if end == sequence.num_known_tokens and end - start <= room:
        return end - start
    return sequence.embedded.max_chunk(start, start + num_tokens) - start


class Scheduler:
    """Plans steps for the running groups, and is the one place where sequences change.

    A group decodes when each of its sequences has one token left to compute; all of them take part
    in the same step. Before that the group computes its prompt, or all its tokens after a
    preemption, in chunks. A request that asks for several samples has one sequence until its prompt
    is computed; the first token of each sample is drawn in the same step.

    Attributes:
        limits: The steps that the compiled shapes hold.
        block_manager: The owner of all block tables.
        max_num_seqs: The most sequences that run at a time.
        has_priorities: True if the policy looks at the priority of requests.
        num_preemptions: How many groups were preempted, by what became of them.
        prefix_counts: How many tokens were found in the prefix cache and among pins.
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
        """Makes a scheduler without requests.

        Args:
            limits: The steps that the compiled shapes hold.
            block_manager: The owner of the block tables.
            max_num_seqs: The most sequences that run at a time.
            queue: The waiting queue, empty; None for first come, first served.
            preemption: The settings of preemption; None for the defaults.
            max_loras: The most LoRA adapters that the running requests may have.

        Raises:
            ValueError: A step does not hold a token of each of `max_num_seqs` sequences.
        """
        if not 1 <= max_num_seqs <= limits.max_rows:
            maximum = limits.max_rows
            raise ValueError(f"{max_num_seqs=} must be between 1 and the {maximum} rows of a step")
        self.limits = limits
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.has_priorities = isinstance(queue, ByPriority)
        self._requests = RunningSet(
            block_manager,
            max_num_seqs=max_num_seqs,
            queue=FirstCome() if queue is None else queue,
            preemption=preemption or Preemption(),
            max_loras=max_loras,
        )
        self.num_preemptions = self._requests.num_preemptions
        self.prefix_counts = self._requests.prefix_counts
        self._gives_way = False
        self._last_was_chunk = False  # where the two kinds of steps alternate: the kind of the last
        self._num_steps = 0  # the number of steps that were planned
        self._several = SeveralSteps(limits)

    @property
    def running(self) -> tuple[SequenceGroup, ...]:
        """Returns the groups that own blocks, in order of rank."""
        return self._requests.running

    @property
    def waiting(self) -> tuple[SequenceGroup, ...]:
        """Returns the groups that own no block of the pools, the next to be admitted first."""
        return self._requests.waiting

    @property
    def num_running(self) -> int:
        """Returns how many groups run."""
        return self._requests.num_running

    @property
    def num_waiting(self) -> int:
        """Returns how many groups wait."""
        return self._requests.num_waiting

    @property
    def num_swapped(self) -> int:
        """Returns how many of the waiting groups have their blocks in host memory."""
        return self._requests.num_swapped

    @property
    def runs_several_steps(self) -> bool:
        """Returns whether one executable may run several decode steps."""
        return self.limits.num_steps > 1

    def is_swapped(self, group: SequenceGroup) -> bool:
        """Returns whether a sequence of a group has its blocks in host memory."""
        return is_swapped(group, self.block_manager)

    @property
    def has_unfinished(self) -> bool:
        """Returns whether any group runs or waits."""
        return self.num_running + self.num_waiting > 0

    @property
    def has_sequence_slots(self) -> bool:
        """Returns whether the first waiting group fits into the sequence slots that are free."""
        return self._requests.has_sequence_slots

    @property
    def num_used_blocks(self) -> int:
        """Returns how many blocks are handed out."""
        return self.block_manager.num_usable - self.block_manager.num_free

    def block_counts(self) -> BlockCounts:
        """Returns the numbers of blocks, by their state."""
        return self.block_manager.counts()

    def usage(self) -> MemorySplit:
        """Returns how the slots of the pools are used; see `RunningSet.usage`."""
        return self._requests.usage()

    # Requests come and go between two steps.

    def add(self, group: SequenceGroup) -> None:
        """Takes in a new group, which waits.

        Raises:
            CapacityError: The group could not run even if it were alone.
            ValueError: The request id is in use, or the prompt is empty or as long as the request
                may become.
        """
        self._requests.add(group)
        self._several.note_arrival()

    def abort(self, request_id: str, reason: str = "abort") -> SequenceGroup | None:
        """Ends a group in whatever state it is, and gives its blocks back at once.

        Returns:
            The group, or None if there is none with this id any more.
        """
        return self._requests.abort(request_id, reason)

    def pin(self, pin_id: int, request_id: str) -> SequenceGroup:
        """Ends a running request, and keeps its computed prompt in place.

        Args:
            pin_id: The id of the pin, to be given to `block_manager.unpin`.
            request_id: The request; its prompt is computed.

        Returns:
            The group of the request.

        Raises:
            CapacityError: Another request could not run alone any more. Nothing has changed.
        """
        manager = self.block_manager
        (group,) = (group for group in self.running if group.request.request_id == request_id)
        prompt = group.request.content_ids
        sequence = group.unfinished[0]
        assert sequence.num_computed_tokens >= len(prompt), "the prompt is not computed yet"
        # First, because the room next to the pins is counted with it.
        manager.pin(pin_id, sequence.sequence_id, Pin(prompt, group.request.prefix_salt))
        others = [other for other in self._requests.groups if other is not group]
        try:
            refuse_to_crowd_out(others, manager, len(prompt))
        except CapacityError:
            manager.unpin(pin_id)
            raise
        self.abort(request_id)
        return group

    def give_way(self) -> None:
        """Has the next plan begin with a preemption if two groups run, whatever there is room for.

        Tests show with it that a request draws the same tokens wherever it is preempted.
        """
        self._gives_way = True

    def preempt_all(self) -> None:
        """Has every group start over, after a step that was planned and did not happen."""
        self._requests.start_over()

    def replace_weights(self, version: int, *, recomputes: bool) -> tuple[str, ...]:
        """Has all groups go on with other weights; see `RunningSet.replace_weights`."""
        return self._requests.replace_weights(version, recomputes=recomputes)

    @property
    def prefix_cache(self) -> CachedBlocks | None:
        """Returns the cached blocks; None where prefix caching is off."""
        return self.block_manager.cached

    def forget_cached(self) -> None:
        """Makes sure that no request finds a block that was computed before now."""
        self.block_manager.forget_cached()

    @property
    def pins(self) -> Mapping[int, Pin]:
        """Returns the pinned prefixes by their ids."""
        return self.block_manager.pins

    def unpin(self, pin_id: int) -> None:
        """Gives up a pin and its blocks."""
        self.block_manager.unpin(pin_id)

    def lose_pages(self) -> None:
        """Forgets what was in the blocks: all groups start over, nothing is cached or pinned."""
        self.preempt_all()
        self.block_manager.lose_pages()

    def check(self) -> None:
        """Asserts what holds between two steps."""
        self._requests.check()

    def plan(self, drafts: Drafts = NO_DRAFTS) -> StepPlan | None:
        """Returns the next step, or None when there is nothing to do.

        The blocks of the step are reserved. No sequence is changed but those that are admitted or
        preempted.

        Args:
            drafts: What may follow some sequences. As many drafts are verified as fit in a step in
                which every row decodes, and in the blocks that are free. They are not used where
                `StepLimits.num_steps` is more than 1: there a step draws several tokens of a row.
        """
        step = PlanBuilder()
        if self._gives_way and self.num_running > 1:
            self._requests.preempt_last(step)
        self._gives_way = False
        decoding, computing = self._divide()
        num_decoding = sum(len(members) + len(group.pending_forks) for group, members in decoding)
        mixes = self.limits.holds_chunks_with(num_decoding)
        if mixes and self._has_room_for_whole(computing, num_decoding):
            self._plan_decoding(step, decoding)
            self._plan_chunks(step, computing)
        elif self._last_was_chunk:
            self._plan_decoding(step, decoding)
            self._last_was_chunk = False
        if not step.work:
            self._plan_chunks(step, computing)
            self._last_was_chunk = bool(step.work) or step.num_admitted > 0
        if not step.work:
            # Divide again: a group that was admitted just now can decode at once if all but one
            # token of each of its sequences was found.
            decoding, _ = self._divide()
            self._plan_decoding(step, decoding)
        while not step.work and self.num_running > 1 and not step.num_admitted:
            self._requests.preempt_last(step)  # no chunk has room: see `_reserve_chunk`
            self._plan_chunks(step, computing)
        if not step.work:
            assert not self.has_unfinished, "there are unfinished groups, and none can run"
            return None
        if self.runs_several_steps:
            drafts = self._several_steps(step)
        if drafts.of:
            self._plan_drafts(step, drafts.of)
        self._num_steps += 1
        self._several.count_step(step)
        return step.freeze(self._num_steps, self.block_manager)

    def _has_room_for_whole(self, computing: list[Members], num_decoding: int) -> bool:
        """Returns whether the next chunk fits next to the rows that decode.

        A picture whose tokens see each other both ways is in one chunk. If it needs more room,
        steps of chunks and of decodes alternate.
        """
        room = self.limits.max_tokens - num_decoding
        _, sequences = computing[0] if computing else (None, [])
        starts = [
            (sequence.embedded, sequence.num_computed_tokens)
            for sequence in sequences
            if sequence.takes_vectors
        ]
        return all(
            embedded is None or embedded.end_of_whole(start) - start <= room
            for embedded, start in starts
        )

    def _divide(self) -> tuple[list[Members], list[Members]]:
        """Returns the running groups that decode, and those that have more to compute."""
        decoding: list[Members] = []
        computing: list[Members] = []
        for group in self.running:
            sequences = group.unfinished
            if decodes(sequences):
                decoding.append((group, sequences))
            else:
                computing.append((group, sequences))
        return decoding, computing

    def _plan_decoding(self, step: PlanBuilder, decoding: list[Members]) -> None:
        """Computes a token of every sequence that decodes, in order of rank.

        When blocks run out, the running group that ranks last is preempted.
        """
        for group, sequences in decoding:
            if step.preempted and not self._requests.is_running(group):
                return  # the group was preempted, and with it all groups that rank after it
            if self._make_room(group, sequences, step):
                for sequence in sequences:
                    step.compute(group, sequence, 1)

    def _several_steps(self, step: PlanBuilder) -> Drafts:
        """Returns places for the tokens that the step draws one after the other.

        The row of a sequence goes on with each of them. The places are planned, booked, logged and
        replayed as drafts that are all right. The host sees none of the tokens before all are
        drawn. If any request of the step needs the host between two tokens, the step therefore
        draws one token of each sequence. This is decided from the step as it is planned: a group
        that was not running before may have been admitted by it.
        """
        if any([group.request.beam or group.request.processes_logits for group, _, _ in step.work]):
            return NO_DRAFTS
        if step.takes_vectors:
            return NO_DRAFTS
        if (num_steps := self._several.choose(step, self._requests)) < 2:
            return NO_DRAFTS
        places = chain((PLACEHOLDER,) * (num_steps - 1))
        return Drafts({sequence.sequence_id: places for _, sequence, _ in step.work})

    def _plan_drafts(self, step: PlanBuilder, drafts: Mapping[int, Draft]) -> None:
        """Adds drafts to a step in which every sequence decodes.

        Drafts are served in order of rank, and only from blocks that are free: a draft neither
        preempts a request nor makes one wait. Two kinds of requests get none:
          * a beam search, because the beams that go on are known only after all have drawn;
          * a prefix that is computed for a pin, because accepted drafts would end it before
            it is pinned.
        """
        if any(
            [
                sequence.num_pending_tokens > 1 or group.pending_forks
                for group, sequence, _ in step.work
            ]
        ):
            return
        if step.takes_vectors:
            return
        num_rows = len(step.work)
        budget = self.limits.draft_budget(num_rows)
        for group, sequence, _ in step.work:
            request = group.request
            draft = drafts.get(sequence.sequence_id)
            if draft is None or request.beam or request.is_prefix:
                continue
            if not self.limits.trees:
                draft = draft.first_branch()
            # A token is drawn after the last draft.
            num_left = request.max_total_tokens - sequence.num_known_tokens - 1
            maximum = min(budget, self.limits.max_drafts(num_rows), num_left)
            budget -= self._add_draft(step, sequence, draft, maximum)

    def _add_draft(self, step: PlanBuilder, sequence: Sequence, draft: Draft, maximum: int) -> int:
        """Adds what free blocks hold of a draft, at most `maximum` tokens; returns how many."""
        manager = self.block_manager
        start = sequence.num_known_tokens
        for num_tokens in range(min(len(draft.token_ids), maximum), 0, -1):
            span = (sequence.sequence_id, start, start + num_tokens)
            if manager.has_room([span]):
                step.add_copies(manager.reserve(*span), manager)
                step.drafts[sequence.sequence_id] = draft.cut(num_tokens)
                return num_tokens
        return 0

    def _make_room(
        self,
        group: SequenceGroup,
        sequences: list[Sequence],
        step: PlanBuilder,
    ) -> bool:
        """Reserves a token for each sequence of a group.

        A step admits or preempts, never both: the blocks of a group that was just admitted are
        filled in this very step.

        Returns:
            False if there is no room in this step, or if the group itself was preempted.
        """
        manager = self.block_manager
        if manager.slides:
            for sequence in sequences:
                manager.slide(sequence.sequence_id, sequence.num_computed_tokens)
        if all(
            [
                manager.can_write(sequence.sequence_id, sequence.num_computed_tokens)
                for sequence in sequences
            ]
        ):
            return True  # the common case: the last block of 16 still has room
        starts = [(sequence.sequence_id, sequence.num_computed_tokens) for sequence in sequences]
        spans = [(sequence_id, start, start + 1) for sequence_id, start in starts]
        while not manager.has_room(spans):
            if step.num_admitted or self._requests.preempt_last(step) is group:
                return False
        for span in spans:
            step.add_copies(manager.reserve(*span), manager)
        return True

    def _plan_chunks(self, step: PlanBuilder, computing: list[Members]) -> None:
        """Computes tokens of running groups that do not decode yet, then of newly admitted ones.

        The first group takes all that the limits of the step allow. A newcomer needs no chunk if
        all its tokens but the last one were found. If no chunk comes before it, it decodes in this
        step, and no group after it gets a chunk.
        """
        for group, sequences in computing:
            if not step.preempted or self._requests.is_running(group):
                self._add_chunks(step, group, sequences)
        has_decoding = False
        while not step.preempted and self._has_room(step):
            newcomer = self._requests.admit_next(step)
            if newcomer is None:
                return
            sequences = newcomer.unfinished
            was_found = sequences[0].num_computed_tokens > 0 or bool(newcomer.pending_forks)
            if decodes(sequences) and was_found:
                has_decoding = True
            elif has_decoding and not step.work:
                return  # the group before it decodes in this step
            else:
                self._add_chunks(step, newcomer, sequences)

    def _has_room(self, step: PlanBuilder) -> bool:
        """Returns whether the step holds another token, in a row of its own."""
        limits = self.limits
        return step.num_tokens < limits.max_tokens and step.num_rows < limits.max_chunk_rows

    def _add_chunks(
        self,
        step: PlanBuilder,
        group: SequenceGroup,
        sequences: list[Sequence],
    ) -> None:
        """Computes the next tokens of each sequence of a group, as many as the step holds."""
        # The sequences of a group draw in the same step, so the last token of each waits until all
        # have one token left. It also waits where one prompt is drawn from several times: a step of
        # single tokens has as many rows, and draws, as there are sequence slots.
        num_kept = 1 if len(sequences) > 1 or group.pending_forks else 0
        for sequence in sequences:
            room = self.limits.max_tokens - step.num_tokens
            num_tokens = min(sequence.num_pending_tokens - num_kept, room)
            if sequence.takes_vectors:
                num_tokens = _cut_chunk(sequence, num_tokens, room)
            if num_tokens <= 0 or not self._has_room(step):
                continue
            if self._reserve_chunk(step, sequence, num_tokens):
                step.compute(group, sequence, num_tokens)

    def _reserve_chunk(self, step: PlanBuilder, sequence: Sequence, num_tokens: int) -> bool:
        """Reserves the blocks of a chunk; returns False if there are too few.

        They are there since the admission, unless a window slides over blocks that other sequences
        share by now.
        """
        manager = self.block_manager
        sequence_id = sequence.sequence_id
        start = sequence.num_computed_tokens
        manager.slide(sequence_id, start)
        for stop in (sequence.num_known_tokens, start + num_tokens):
            if manager.has_room([(sequence_id, start, stop)]):
                step.add_copies(manager.reserve(sequence_id, start, stop), manager)
                return True
        return False

    def commit(self, plan: StepPlan, edits: Iterable[Edit]) -> list[SequenceGroup]:
        """Books a step that happened: its rows are computed, then its edits apply in order.

        Rows and edits of groups that were aborted between `plan` and `commit` are passed over.
        `Engine.step` never leaves any.

        Returns:
            The groups that an edit touched, in the order of their first edit. A score alone does
            not count, because a draw always follows.
        """
        for row in plan.rows:
            # Before the edits: a full block must be cached before a finish gives it up.
            if row.sequence_id in self._requests.sequences:
                self._book(row, plan.step_id)
        touched: dict[str, SequenceGroup] = {}
        for edit in edits:
            changed = apply_edit(edit, self._requests.sequences, self.block_manager)
            if changed is None or type(edit) is Score:
                continue
            touched[changed.request.request_id] = changed
            if type(edit) is Append:
                self._requests.served(changed)
                if edit.drafted:
                    self._count_computed_ahead(changed, edit.sequence_id)
        for row in plan.rows:
            if row.parents and row.sequence_id in self.block_manager.sequence_ids:
                _, sequence = self._requests.sequences[row.sequence_id]
                # The blocks of wrong drafts are given up.
                self.block_manager.trim(row.sequence_id, sequence.num_computed_tokens)
        for group in touched.values():
            if group.finished:
                self._requests.remove(group)
        return list(touched.values())

    def _book(self, row: Row, step_id: int) -> None:
        """Counts the known tokens of a row as computed."""
        group, sequence = self._requests.sequences[row.sequence_id]
        start = row.start
        assert sequence.num_computed_tokens == start, f"step {step_id} is committed out of turn"
        # Drafts that were right are counted with the edits that append them.
        stop = start + len(row.token_ids) - len(row.parents)
        sequence.num_computed_tokens = stop
        if self.block_manager.num_to_cache(stop) > self.block_manager.num_to_cache(start):
            self._cache(group, sequence)

    def _count_computed_ahead(self, group: SequenceGroup, sequence_id: int) -> None:
        """Counts a draft that became a token of its sequence as computed."""
        _, sequence = self._requests.sequences[sequence_id]
        before = sequence.num_computed_tokens
        sequence.num_computed_tokens += 1
        if self.block_manager.num_to_cache(before + 1) > self.block_manager.num_to_cache(before):
            self._cache(group, sequence)

    def _cache(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Has other requests find another block of a sequence, which is full and computed."""
        self.block_manager.cache(
            sequence.sequence_id,
            sequence.num_computed_tokens,
            sequence.content_ids,
            sequence.block_digests,
            group.request.prefix_salt,
        )
