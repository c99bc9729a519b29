"""A step while it is being planned: which sequence computes how many tokens, and what that costs of the step's limits."""

from __future__ import annotations

from collections.abc import Iterable

from jaxpage.memory import BlockManager
from jaxpage.step.draft import Draft
from jaxpage.step.plan import Row, Sample, StepPlan
from jaxpage.step.request import Request, Sequence, SequenceGroup


class PlanBuilder:
    """Collects work, memory commands and preemptions until they are frozen into a plan."""

    def __init__(self) -> None:
        self.work: list[tuple[SequenceGroup, Sequence, int]] = []  # who computes how many of its next tokens
        self.num_tokens = 0
        self.num_extra_samples = 0  # draws that have no row of their own
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int]] = []
        self.preempted: list[str] = []
        self.num_admitted = 0  # groups
        self.drafts: dict[int, Draft] = {}  # by sequence id, of sequences that compute one token

    def compute(self, group: SequenceGroup, sequence: Sequence, num_tokens: int) -> None:
        self.work.append((group, sequence, num_tokens))
        self.num_tokens += num_tokens
        if group.child_ids and sequence.num_pending_tokens == num_tokens:
            self.num_extra_samples += len(group.pending_forks)

    def add_copies(self, copies: Iterable[tuple[int, int]], block_manager: BlockManager) -> None:
        for source, destination in copies:
            # A source that were free could be handed out to a swap-in of this very step, which happens before the copies.
            assert block_manager.is_used(source), f"block {source} is copied and was given up"
            self.copies.append((source, destination))

    @property
    def num_rows(self) -> int:
        """Rows that the step's shape must have: it holds as many draws."""
        return len(self.work) + self.num_extra_samples

    def freeze(self, step_id: int, block_manager: BlockManager) -> StepPlan:
        """The plan, with its rows in the order of the work and a draw wherever a row reaches the last known token.

        The first token of a request's samples is drawn from the same row, once for each.
        """
        rows: list[Row] = []
        samples: list[Sample] = []
        for group, sequence, num_tokens in self.work:
            sequence_id, start, known = sequence.sequence_id, sequence.num_computed_tokens, sequence.token_ids
            draws = start + num_tokens == len(known)
            if draws:
                sample = sample_of(len(rows), num_tokens, sequence, group.request)
                if group.child_ids:
                    children = enumerate(group.pending_forks, start=1)
                    samples += [sample._replace(sequence_id=child, sample_index=index) for index, child in children]
                samples.append(sample)
            token_ids = (known[start],) if num_tokens == 1 else tuple(known[start : start + num_tokens])
            row = Row(sequence_id, start, token_ids, block_manager.block_tables(sequence_id))
            if group.request.lora:
                row = row._replace(lora=group.request.lora.digest)
            if not draws:
                row = row._replace(next_token_id=known[start + num_tokens])
            if draft := self.drafts.get(sequence_id):
                row = row._replace(
                    token_ids=token_ids + draft.token_ids, parents=tuple(p + 1 for p in draft.parents), q=draft.q
                )
                samples += drafted_samples(samples[-1], draft, sequence, group.request)
            decodes = draws and num_tokens == 1  # as most rows do: no token of the prompt stands behind it
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


def _scoring(row: Row, group: SequenceGroup) -> Row:
    """The row, asking for the log probabilities of the prompt's tokens behind its own that have none yet."""
    if not group.num_unscored:
        return row
    num_known = len(group.prompt_logprobs)
    scored = group.request.prompt_token_ids[num_known + 1 : row.context_length + 1]
    if not scored:
        return row
    first, num_top = num_known - row.start, group.request.params.prompt_logprobs
    assert first >= 0 and num_top is not None, f"sequence {row.sequence_id} passes over tokens that are to be scored"
    return row._replace(scored=scored, first_scored=first, num_logprobs=num_top)


def sample_of(row: int, num_tokens: int, sequence: Sequence, request: Request) -> Sample:
    """The draw from the last token of a row that reaches the last known token of its sequence."""
    known, params = sequence.token_ids, request.params
    sample = Sample(
        row,
        num_tokens - 1,
        sequence.sequence_id,
        params,
        request.seed,
        sequence.sample_index,
        len(known),
        num_logprobs=request.num_logprobs,
    )
    return _processed(sample, request, known) if request.processes_logits else sample  # most are not


def drafted_samples(sample: Sample, draft: Draft, sequence: Sequence, request: Request) -> list[Sample]:
    """The draws behind each draft, as if the drafts before it were known. `sample`: the draw from the last known token."""
    row, _, sequence_id, params, seed, sample_index, position, _, _, num_logprobs, history, num_prompt_tokens, _ = (
        sample
    )
    suppresses = bool(request.params.min_tokens or request.bad_word_token_ids)
    samples = []
    for index, depth in enumerate(draft.depths):  # several draws for every token that comes out: each is made in one go
        path = draft.path(index) if request.processes_logits else ()
        suppressed = suppression(request, [*sequence.token_ids, *path]) if suppresses else (False, ())
        who = (row, 1 + index, sequence_id, params, seed, sample_index, position + depth)
        samples.append(Sample(*who, *suppressed, num_logprobs, history, num_prompt_tokens, path))
    return samples


def _processed(sample: Sample, request: Request, known: list[int]) -> Sample:
    is_early, suppressed = suppression(request, known)
    return sample._replace(
        is_early=is_early,
        suppressed_token_ids=suppressed,
        history=tuple(known) if request.params.penalises else (),
        num_prompt_tokens=len(request.prompt_token_ids),
    )


def suppression(request: Request, known: list[int]) -> tuple[bool, tuple[int, ...]]:
    """Whether the next draw is below min_tokens, and what may not be drawn in it beside stop ids: see `Sample`.

    As in vLLM a bad word counts only where all of it is output: the prompt begins none.
    """
    num_output = len(known) - len(request.prompt_token_ids)
    is_early = num_output < request.params.min_tokens
    suppressed = set(request.bad_token_ids)
    if is_early:
        suppressed |= request.eos_token_ids
    for word in request.bad_words_behind.get(known[-1], ()):
        if len(word) <= num_output + 1 and word[:-1] == tuple(known[1 - len(word) :]):
            suppressed.add(word[-1])
    return is_early, tuple(sorted(suppressed))
