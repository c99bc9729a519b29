"""Continuous batching over paged memory: what each step computes, and the one place where sequences change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jaxpage.scheduling.committing import apply_edit
from jaxpage.scheduling.plan_builder import PlanBuilder
from jaxpage.scheduling.running_set import RunningSet
from jaxpage.step.draft import NO_DRAFTS, PLACEHOLDER, Draft, Drafts, chain
from jaxpage.step.edits import Append, Edit, Score
from jaxpage.step.plan import StepPlan
from jaxpage.step.request import Sequence, SequenceGroup

Members = tuple[SequenceGroup, list[Sequence]]  # a group and those of its sequences that are not finished


def decodes(sequences: list[Sequence]) -> bool:
    """Whether each sequence of a group has one token left to compute."""
    return all([len(s.token_ids) - s.num_computed_tokens == 1 for s in sequences])


class Scheduler(RunningSet):
    """Plans steps for the running groups, and commits what came of them.

    There are no phases: a sequence has tokens known and tokens computed, and is given work so that the second catches up. With one token
    left for each of its sequences a group decodes, all sequences in the same step; before that it computes its prompt, or after a
    preemption all its tokens, in chunks. A request that asks for several sequences has one until its prompt is computed; the first token
    of each is drawn in the same step.
    """

    _last_was_chunk = False  # where the two kinds of steps alternate: whose turn it is
    _num_steps = 0  # that were planned

    def plan(self, drafts: Drafts = NO_DRAFTS) -> StepPlan | None:
        """The next step, or None when there is nothing to do. Reserves its blocks; changes no sequence but those it preempts.

        drafts: what may follow. They are suggestions: as many are verified as fit in a step in which everybody decodes, and in the blocks
        that are free. Where `StepLimits.num_steps` is more than 1, nobody drafts, and the step draws several tokens of each sequence.
        """
        step = PlanBuilder()
        decoding, computing = self._divide()
        num_decoding = sum(len(sequences) + len(group.pending_forks) for group, sequences in decoding)
        if self.limits.holds_chunks_beside(num_decoding):
            self._plan_decoding(step, decoding)
            self._plan_chunks(step, computing)
        elif self._last_was_chunk:
            self._plan_decoding(step, decoding)
            self._last_was_chunk = False
        if not step.work:
            self._plan_chunks(step, computing)
            self._last_was_chunk = bool(step.work) or step.num_admitted > 0
        if not step.work:
            decoding, _ = self._divide()  # once more: who was just admitted with one token per sequence decodes
            self._plan_decoding(step, decoding)
        while not step.work and len(self._running) > 1 and not step.num_admitted:
            self._preempt_last(step)  # no chunk has room: see _reserve_chunk
            self._plan_chunks(step, computing)
        if not step.work:
            assert not self._groups, "there are unfinished groups, and none can run"
            return None
        if self.limits.num_steps > 1:
            drafts = self._several_steps(step)
        if drafts.of:
            self._plan_drafts(step, drafts.of)
        self._num_steps += 1
        return step.freeze(self._num_steps, self.block_manager)

    def _divide(self) -> tuple[list[Members], list[Members]]:
        """The running groups with their unfinished sequences: those that decode, and those with more to compute."""
        decoding: list[Members] = []
        computing: list[Members] = []
        for group in self._running.values():
            sequences = group.unfinished
            (decoding if decodes(sequences) else computing).append((group, sequences))
        return decoding, computing

    def _plan_decoding(self, step: PlanBuilder, decoding: list[Members]) -> None:
        """One token for every sequence that decodes, the lowest rank first; the highest is preempted when blocks run out."""
        for group, sequences in decoding:
            if step.preempted and group.request.request_id not in self._running:
                return  # was preempted, and with it all of higher rank
            if self._make_room(group, sequences, step):
                for sequence in sequences:
                    step.compute(group, sequence, 1)

    def _several_steps(self, step: PlanBuilder) -> Drafts:
        """Returns places for the tokens that the step draws one after the other, each of which its row goes on with.

        The places are planned, booked, logged and replayed as drafts that are all right. The host sees none of the tokens before all
        are drawn. If any request of the step needs the host between two tokens, the step therefore draws one token of each sequence.
        This is decided from the step as it is planned: a group that was not running before may have been admitted by it.
        """
        if any([group.request.beam or group.request.processes_logits for group, _, _ in step.work]):
            return NO_DRAFTS
        places = chain((PLACEHOLDER,) * (self.limits.num_steps - 1))
        return Drafts({sequence.sequence_id: places for _, sequence, _ in step.work})

    def _plan_drafts(self, step: PlanBuilder, drafts: Mapping[int, Draft]) -> None:
        """Adds drafts to a step of single draws, the lowest rank first. No request is preempted or waits for them: they come last.

        Which beam goes on behind a token is not known before all have drawn, so beams have no drafts. Neither has a prefix that is computed
        to be pinned: right drafts would take it to its end.
        """
        if any(sequence.num_pending_tokens > 1 or group.pending_forks for group, sequence, _ in step.work):
            return
        num_left, manager = self.limits.draft_budget(len(step.work)), self.block_manager
        for group, sequence, _ in step.work:
            draft = drafts.get(sequence.sequence_id)
            if draft is None or group.request.beam or group.request.is_prefix:
                continue
            if not self.limits.trees:
                draft = draft.first_branch()
            start = sequence.num_known_tokens
            most = min(num_left, self.limits.most_drafts(len(step.work)), group.request.max_total_tokens - start - 1)
            num_drafts = min(len(draft.token_ids), most)
            while num_drafts > 0:
                span = (sequence.sequence_id, start, start + num_drafts)
                if manager.has_room([span]):
                    step.add_copies(manager.reserve(*span), manager)
                    step.drafts[sequence.sequence_id] = draft.cut(num_drafts)
                    num_left -= num_drafts
                    break
                num_drafts -= 1

    def _make_room(self, group: SequenceGroup, sequences: list[Sequence], step: PlanBuilder) -> bool:
        """Reserves a token for each sequence of the group. False: there is no room in this step, or the group itself was preempted.

        A step admits or preempts, never both: the blocks of who was just admitted are filled in this very step.
        """
        manager = self.block_manager
        if manager.slides:
            for sequence in sequences:
                manager.slide(sequence.sequence_id, sequence.num_computed_tokens)
        if all([manager.can_write(s.sequence_id, s.num_computed_tokens) for s in sequences]):
            return True  # as fifteen times in sixteen
        spans = [(s.sequence_id, s.num_computed_tokens, s.num_computed_tokens + 1) for s in sequences]
        while not manager.has_room(spans):
            if step.num_admitted or self._preempt_last(step) is group:
                return False
        for span in spans:
            step.add_copies(manager.reserve(*span), manager)
        return True

    def _plan_chunks(self, step: PlanBuilder, computing: list[Members]) -> None:
        """Tokens for the running groups that do not decode yet, then for those that can be admitted, up to the step's limits.

        Who comes first takes all it can. Only who found all but the last token in place decodes before an older group does.
        """
        for group, sequences in computing:
            if not step.preempted or group.request.request_id in self._running:
                self._add_chunks(step, group, sequences)
        has_decoding = False
        while not step.preempted and self._has_room(step):
            newcomer = self._queue.first()
            if newcomer is None or not self._admit(newcomer, step):
                return
            sequences = newcomer.unfinished
            if decodes(sequences) and (sequences[0].num_computed_tokens or newcomer.pending_forks):
                has_decoding = True  # all but the last token was in place
            elif has_decoding and not step.work:
                return  # who is older decodes first; the newcomer's turn comes next
            else:
                self._add_chunks(step, newcomer, sequences)

    def _has_room(self, step: PlanBuilder) -> bool:
        return step.num_tokens < self.limits.max_tokens and step.num_rows < self.limits.max_chunk_rows

    def _add_chunks(self, step: PlanBuilder, group: SequenceGroup, sequences: list[Sequence]) -> None:
        # Sequences of one group draw in the same step or not at all: the last token waits until each has one left. Where the first
        # draws are several it waits too: a step of single tokens has as many rows, and draws, as there are sequence slots.
        num_kept = 1 if len(sequences) > 1 or group.pending_forks else 0
        for sequence in sequences:
            num_tokens = min(sequence.num_pending_tokens - num_kept, self.limits.max_tokens - step.num_tokens)
            if num_tokens > 0 and self._has_room(step) and self._reserve_chunk(step, sequence, num_tokens):
                step.compute(group, sequence, num_tokens)

    def _reserve_chunk(self, step: PlanBuilder, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for a chunk: they are there since the admission, unless a window slides over what others share by now."""
        manager, sequence_id, start = self.block_manager, sequence.sequence_id, sequence.num_computed_tokens
        manager.slide(sequence_id, start)
        for stop in (sequence.num_known_tokens, start + num_tokens):
            if manager.has_room([(sequence_id, start, stop)]):
                step.add_copies(manager.reserve(sequence_id, start, stop), manager)
                return True
        return False

    def commit(self, plan: StepPlan, edits: Iterable[Edit]) -> list[SequenceGroup]:
        """Books a step that happened: its rows are computed, then the edits apply, in order.

        Rows and edits of groups that were aborted meanwhile are passed over.

        Returns:
            The groups that an edit touched, in the order of their first one. Scores alone are no news: a draw always follows.
        """
        block_size = self.block_manager.block_size
        for row in plan.rows:
            if row.sequence_id in self._sequences:
                group, sequence = self._sequences[row.sequence_id]
                start = row.start
                assert sequence.num_computed_tokens == start, f"step {plan.step_id} is committed out of turn"
                sequence.num_computed_tokens = stop = start + len(row.token_ids) - len(row.parents)
                if stop // block_size > start // block_size:
                    self._cache(group, sequence)
        touched: dict[str, SequenceGroup] = {}
        for edit in edits:
            changed = apply_edit(edit, self._sequences, self.block_manager)
            if changed is not None and type(edit) is not Score:
                touched[changed.request.request_id] = changed
                if type(edit) is Append:
                    self._queue.served(changed, 1)
                    if edit.drafted:
                        self._computed_ahead(changed, edit.sequence_id)
        for row in plan.rows:
            if row.parents and row.sequence_id in self.block_manager.sequence_ids:
                _, sequence = self._sequences[row.sequence_id]
                self.block_manager.trim(row.sequence_id, sequence.num_computed_tokens)  # what wrong drafts had
        for group in touched.values():
            if group.finished:
                self._forget(group)
        return list(touched.values())

    def _computed_ahead(self, group: SequenceGroup, sequence_id: int) -> None:
        """A draft became a token of its sequence: it is computed already."""
        _, sequence = self._sequences[sequence_id]
        sequence.num_computed_tokens += 1
        if sequence.num_computed_tokens % self.block_manager.block_size == 0:
            self._cache(group, sequence)

    def _cache(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Another block of the sequence is full and computed: from now on others find it."""
        salt, num_computed = group.request.prefix_salt, sequence.num_computed_tokens
        self.block_manager.cache(sequence.sequence_id, num_computed, sequence.token_ids, sequence.block_digests, salt)
