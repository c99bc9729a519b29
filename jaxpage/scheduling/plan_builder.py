"""Collects a step while it is being planned, and freezes it into a plan."""

from __future__ import annotations

from collections.abc import Iterable

from jaxpage.memory import BlockManager
from jaxpage.step.draft import Draft
from jaxpage.step.plan import Row, Sample, StepPlan
from jaxpage.step.request import Request, Sequence, SequenceGroup


class PlanBuilder:
    """Collects work, memory commands and preemptions until they are frozen into a plan.

    Where the limits allow mixed steps, a chunk of a prompt follows the sequences that decode:

        row 0   sequence 3   [t40]                       decodes: one token, one draw
        row 1   sequence 5   [t17]                       decodes: one token, one draw
        row 2   sequence 8   [t0 t1 t2 .. t13]           a chunk: no draw before its last token

    Attributes:
        work: The group, the sequence, and how many of its next tokens the step computes.
        num_tokens: The tokens of all work.
        num_extra_samples: The draws that have no row of their own.
        swap_out: The pairs (block, host block) to move before anything else.
        swap_in: The pairs (host block, block) to move after that.
        copies: The pairs (source block, destination block) to copy after that.
        preempted: The ids of the requests that gave their blocks up for this step.
        num_admitted: The number of groups that were admitted.
        drafts: The drafts by sequence id; each of these sequences computes one token.
    """

    def __init__(self) -> None:
        """Begins a step without work."""
        self.work: list[tuple[SequenceGroup, Sequence, int]] = []
        self.num_tokens = 0
        self.num_extra_samples = 0
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int]] = []
        self.preempted: list[str] = []
        self.num_admitted = 0
        self.drafts: dict[int, Draft] = {}

    def compute(self, group: SequenceGroup, sequence: Sequence, num_tokens: int) -> None:
        """Has the step compute the next tokens of a sequence."""
        self.work.append((group, sequence, num_tokens))
        self.num_tokens += num_tokens
        if group.child_ids and sequence.num_pending_tokens == num_tokens:
            self.num_extra_samples += len(group.pending_forks)

    def add_copies(self, copies: Iterable[tuple[int, int]], block_manager: BlockManager) -> None:
        """Has the step copy blocks before it writes."""
        for source, destination in copies:
            # A free source could be handed out to a swap-in of this very step, which comes before
            # the copies.
            assert block_manager.is_used(source), f"block {source} is copied and was given up"
            self.copies.append((source, destination))

    @property
    def num_rows(self) -> int:
        """Returns how many rows the shape of the step must have: it holds as many draws."""
        return len(self.work) + self.num_extra_samples

    @property
    def takes_vectors(self) -> bool:
        """Returns whether vectors take the place of tokens of the step.

        Only steps without drafts, and of one draw for each sequence, are compiled for that.
        """
        return any([sequence.takes_vectors for _, sequence, _ in self.work])

    def freeze(self, step_id: int, block_manager: BlockManager) -> StepPlan:
        """Returns the plan, with a row for each piece of work and in the same order.

        There is a draw wherever a row reaches the last known token of its sequence. Where a request
        asks for several samples, the first token of each is drawn from the same row.
        """
        rows: list[Row] = []
        samples: list[Sample] = []
        for group, sequence, num_tokens in self.work:
            start = sequence.num_computed_tokens
            known = sequence.token_ids
            draws = start + num_tokens == len(known)
            if draws:
                sample = sample_of(len(rows), num_tokens, sequence, group.request)
                for index, child_id in enumerate(group.pending_forks, start=1):
                    samples.append(sample._replace(sequence_id=child_id, sample_index=index))
                samples.append(sample)
            # Most rows have one token, for which a slice would take longer.
            token_ids: tuple[int, ...] = (known[start],)
            if num_tokens > 1:
                token_ids = tuple(known[start : start + num_tokens])
            tables = block_manager.block_tables(sequence.sequence_id)
            row = Row(sequence.sequence_id, start, token_ids, tables)
            if sequence.embedded is not None and sequence.needs_embedded:
                row = row._replace(embedded=sequence.embedded)
            if group.request.params.return_routed_experts:
                row = row._replace(is_routed=True)
            if group.request.lora:
                row = row._replace(lora=group.request.lora.digest)
            if not draws:
                row = row._replace(next_token_id=known[start + num_tokens])
            if draft := self.drafts.get(sequence.sequence_id):
                row = _with_draft(row, draft)
                # A row with drafts has no forks, so the last sample is its only one.
                samples += make_draft_samples(samples[-1], draft, sequence, group.request)
            # Most rows decode, and no token of the prompt follows theirs.
            decodes = draws and num_tokens == 1
            rows.append(row if decodes else _scoring(row, group))
        return StepPlan(
            step_id,
            tuple(rows),
            tuple(samples),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            copies=tuple(self.copies),
            preempted=tuple(self.preempted),
        )


def _with_draft(row: Row, draft: Draft) -> Row:
    """Returns the row of one known token with a draft after it."""
    # Draft i is token 1 + i of the row, and a draft without a parent follows the known token.
    parents = tuple(parent + 1 for parent in draft.parents)
    return row._replace(token_ids=row.token_ids + draft.token_ids, parents=parents, q=draft.q)


def _scoring(row: Row, group: SequenceGroup) -> Row:
    """Returns the row, asking for the log probabilities of those prompt tokens that have none yet.

    The logits of a row's token give the log probability of the token after it.
    """
    if not group.num_unscored:
        return row
    num_known = len(group.prompt_logprobs)
    scored = group.request.prompt_token_ids[num_known + 1 : row.context_length + 1]
    if not scored:
        return row
    first = num_known - row.start
    num_top = group.request.params.prompt_logprobs
    name = f"sequence {row.sequence_id}"
    assert first >= 0 and num_top is not None, f"{name} passes over tokens that are to be scored"
    return row._replace(scored=scored, first_scored=first, num_logprobs=num_top)


def sample_of(row: int, num_tokens: int, sequence: Sequence, request: Request) -> Sample:
    """Returns the draw from the last token of a row that reaches its sequence's last known token.

    Args:
        row: The number of the row.
        num_tokens: The number of tokens of the row.
        sequence: The sequence that draws.
        request: The request of the sequence.
    """
    known = sequence.token_ids
    sample = Sample(
        row,
        num_tokens - 1,
        sequence.sequence_id,
        request.params,
        request.seed,
        sequence.sample_index,
        len(known),
        num_logprobs=request.num_logprobs,
    )
    if not request.processes_logits:  # the common case
        return sample
    is_early, suppressed = suppression(request, known)
    history: tuple[int, ...] = ()
    if request.params.penalises:
        # A token that a vector takes the place of is no word of the text.
        history = tuple(known) if request.embedded is None else request.embedded.text_ids(known)
    return sample._replace(
        is_early=is_early,
        suppressed_token_ids=suppressed,
        history=history,
        num_prompt_tokens=len(history) - sequence.num_output_tokens if history else 0,
    )


def make_draft_samples(
    sample: Sample,
    draft: Draft,
    sequence: Sequence,
    request: Request,
) -> list[Sample]:
    """Returns the draws after each token of a draft, as if the tokens before it were known.

    Args:
        sample: The draw after the last known token.
        draft: The draft that follows that token.
        sequence: The sequence that draws.
        request: The request of the sequence.
    """
    suppresses = bool(request.params.min_tokens or request.bad_word_token_ids)
    samples = []
    for index, depth in enumerate(draft.depths):
        path = draft.path(index) if request.processes_logits else ()
        is_early = False
        suppressed: tuple[int, ...] = ()
        if suppresses:
            is_early, suppressed = suppression(request, [*sequence.token_ids, *path])
        # A step has several draws for every token that comes out of it, and `_replace` is slower.
        drafted = Sample(
            sample.row,
            1 + index,
            sample.sequence_id,
            sample.params,
            sample.seed,
            sample.sample_index,
            sample.position + depth,
            is_early,
            suppressed,
            sample.num_logprobs,
            sample.history,
            sample.num_prompt_tokens,
            path,
        )
        samples.append(drafted)
    return samples


def suppression(request: Request, known: list[int]) -> tuple[bool, tuple[int, ...]]:
    """Returns whether the next draw is below `min_tokens`, and the ids that it must not give.

    The stop ids of the request are not among them; see `Sample`. A bad word is suppressed only
    where all of it would be output, as in vLLM: the prompt does not begin one.
    """
    num_output = len(known) - len(request.prompt_token_ids)
    is_early = num_output < request.params.min_tokens
    suppressed = set(request.bad_token_ids)
    if is_early:
        suppressed |= request.eos_token_ids
    for word in request.bad_words_after.get(known[-1], ()):
        is_output = len(word) <= num_output + 1
        if is_output and word[:-1] == tuple(known[1 - len(word) :]):
            suppressed.add(word[-1])
    # In one order, because logs have plans and compare them.
    return is_early, tuple(sorted(suppressed))
