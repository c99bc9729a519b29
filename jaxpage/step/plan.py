"""Defines a step as the host plans it (`StepPlan`), and its outcome (`StepResult`).

`BatchBuilder` makes a plan, masks and adapter slots into arrays. A `StepResult` is all that comes
back from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.step.draft import PLACEHOLDER, Candidates
from jaxpage.step.embedded import EmbeddedPrompt, EmbeddedSpan


class Row(NamedTuple):
    """The part of one sequence in a step.

    A row with drafts has one known token and a tree of tokens that may follow it, each after its
    parent. Slots go by the place in the row, positions by the depth in the tree:

        token_ids   ( t40, a, b, c )      a and b may follow t40, c may follow a
        parents     (      0, 0, 1 )      slots 40 41 42 43, positions 40 41 41 42

    Attributes:
        sequence_id: The sequence.
        start: The number of tokens that are computed already; the row begins at this position.
        token_ids: The tokens that are computed.
        block_tables: The sequence's block table in each cache group. They cover every position up
            to the last one of the row.
        parents: The token of the row that each draft or placeholder follows; these are its last
            tokens.
        q: The distributions that the drafts were drawn from; see `Draft`.
        scored: Prompt tokens, one after the other, whose log probabilities are wanted.
        first_scored: The index of the row's token before the first of them.
        num_logprobs: The number of most likely candidates that are wanted with each of them.
        next_token_id: The known token after the row; -1 if it is to be drawn.
        lora: The digest of the LoRA adapter.
        embedded: What vectors take the place of which tokens of the prompt; None if it is of no
            concern to the row.
        is_routed: True if the experts of its tokens are wanted.
    """

    sequence_id: int
    start: int
    token_ids: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]
    parents: tuple[int, ...] = ()
    q: Candidates | None = None
    scored: tuple[int, ...] = ()
    first_scored: int = 0
    num_logprobs: int = 0
    next_token_id: int = -1
    lora: str | None = None
    embedded: EmbeddedPrompt | None = None
    is_routed: bool = False

    @property
    def context_length(self) -> int:
        """Returns how many slots are filled when the row is computed."""
        return self.start + len(self.token_ids)

    @property
    def spans(self) -> tuple[EmbeddedSpan, ...]:
        """Returns the tokens whose place vectors take, by positions in the sequence."""
        if self.embedded is None:
            return ()
        return self.embedded.within(self.start, self.context_length)


def depths_of(parents: Sequence[int]) -> list[int]:
    """Returns the depth of each token of a row in its tree, from `Row.parents`.

    The depth of the known token is 0.
    """
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


class Sample(NamedTuple):
    """One draw of a step.

    A row with drafts has a draw after each of its tokens. Where `sequence_id` is not that of the
    row, the draw begins a new sequence: a fork of the row's sequence as it was before that one's
    own draw. The draws of a row are next to each other, and that of its own sequence is the last.

    The noise of the draw is a function of `seed`, `sample_index` and `position` alone.

    Attributes:
        row: The index of the row.
        offset: The index of the row's token whose logits are drawn from.
        sequence_id: The sequence that gets the token.
        params: The sampling parameters.
        seed: The seed of the request.
        sample_index: The index of the sequence among the samples of its request.
        position: The position of the drawn token in its sequence.
        is_early: True below `min_tokens`: the stop ids of `params` may not be drawn.
        suppressed_token_ids: Other ids that may not be drawn: end-of-sequence ids below
            `min_tokens`, and the last tokens of bad words.
        num_logprobs: The number of most likely candidates that are wanted with the drawn token;
            None if not even the log probability of that token is wanted.
        history: The known tokens, prompt first, where a penalty counts them.
        num_prompt_tokens: The number of prompt tokens in the history.
        drafts: The drafts between the known tokens and the draw, if penalties, masks or bad words
            need them.
    """

    row: int
    offset: int
    sequence_id: int
    params: SamplingParams
    seed: int
    sample_index: int
    position: int
    is_early: bool = False
    suppressed_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None
    history: tuple[int, ...] = ()
    num_prompt_tokens: int = 0
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepPlan:
    """One step, in the order in which it happens.

    Blocks are swapped out, swapped in and copied; then the rows are written and read; then tokens
    are drawn. Swap-out comes first because the blocks that it frees are handed out again in the
    same step. Each list of moves can be done at once: no block is a destination twice, and no copy
    reads a block that another copy of the step has written.

    Attributes:
        step_id: The number of the step, from 1.
        rows: The sequences that take part.
        samples: The draws, those of a row next to each other.
        swap_out: The pairs (block, host block).
        swap_in: The pairs (host block, block).
        copies: The pairs (source block, destination block) of copy-on-write.
        preempted: The ids of the requests that gave up their blocks for this step.
        draft_depth: The number of tokens that a device drafter drafts ahead. With 0 it only
            computes the step's tokens; with None the step may run without it, if there is an
            executable that does.
    """

    step_id: int
    rows: tuple[Row, ...]
    samples: tuple[Sample, ...]
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    preempted: tuple[str, ...] = ()
    draft_depth: int | None = None

    # It writes past `frozen`, into the dictionary of the instance.
    @cached_property
    def verifies(self) -> bool:
        """Returns whether any row has drafts; the placeholders of several steps are none."""
        return not self.is_multi_step and any([row.parents for row in self.rows])

    @cached_property
    def takes_vectors(self) -> bool:
        """Returns whether vectors take the place of any token."""
        return any([row.embedded is not None and bool(row.spans) for row in self.rows])

    @cached_property
    def is_multi_step(self) -> bool:
        """Returns whether rows go on with what they draw; see `StepLimits.num_steps`."""
        return any([row.token_ids[-1] == PLACEHOLDER for row in self.rows])

    @cached_property
    def branches(self) -> bool:
        """Returns whether the drafts of any row are no chain."""
        parents = [row.parents for row in self.rows if row.parents]
        return any([each != tuple(range(len(each))) for each in parents])

    @cached_property
    def num_tokens(self) -> int:
        """Returns how many tokens all rows have."""
        return sum([len(row.token_ids) for row in self.rows])

    @cached_property
    def decodes(self) -> bool:
        """Returns whether each row's own sequence draws after every token of the row.

        Then no prompt goes on after the step, and no sequence is forked.
        """
        drawing = [row.sequence_id for row in self.rows for _ in row.token_ids]
        return [sample.sequence_id for sample in self.samples] == drawing


# -
# `cached_property` writes past `frozen`, into the instance's dictionary.
@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, with an entry for each of `StepPlan.samples`: R draws of B rows.

    Log probabilities are natural logarithms of the raw softmax, or of the distribution that is
    drawn from; see `SamplingParams.logprobs_mode`. A negative token id says why none was drawn; see
    `NOT_FINITE` and `NOTHING_ALLOWED`.

    Attributes:
        token_ids: [R] The drawn tokens.
        logprobs: [R] Their log probabilities.
        ranks: [R] Their ranks, 1 for the most likely token; 0 where no sample of the step asks.
        top_token_ids: [R, W] The most likely candidates.
        top_logprobs: [R, W] Their log probabilities.
        paths: [B, Q] For each row of a step that verifies or has several steps, the draws that
            count, in order, padded with -1.
        draft_candidates: The candidates of a device drafter, for its proposer; padded at the end.
        scored: The scores of `Row.scored`: an entry for each token of all rows, in order, up to
            the last one that is scored. Its "drawn" tokens are those of the prompt.
        num_kept: [R] The tokens that could be drawn, where the log probabilities are of those.
        masks: [R, U] The tokens that could be drawn, in the form of `token_masks`, where a sample
            asks for them.
        routes: [T, L, X] The experts of the tokens of all rows, where a row asks for them; padded
            at the end.
        hidden: [R, D] The hidden states that tokens are drawn from, where a sample asks for them.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    top_token_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]
    paths: npt.NDArray[np.int32] | None = None
    draft_candidates: npt.NDArray[np.int32] | None = None
    scored: StepResult | None = None
    num_kept: npt.NDArray[np.int32] | None = None
    masks: npt.NDArray[np.uint32] | None = None
    routes: npt.NDArray[np.int16] | None = None
    hidden: npt.NDArray[np.float32] | None = None
