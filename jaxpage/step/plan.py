"""What one step is to do (`StepPlan`) and what came of it (`StepResult`): the only two things that cross between host and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.step.draft import PLACEHOLDER, Candidates


class Row(NamedTuple):
    """The part of one sequence in a step: `token_ids` are computed at positions `start`, `start + 1`, ...

    `block_table`, that of the first cache group, covers every position up to the last of them; `start` tokens are already in it. A row
    with drafts is one known token and a tree of what may follow it, each draft behind its parent; a token stands at the position that its
    depth in the tree gives it.
    """

    sequence_id: int
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    # The row's last tokens are drafts or placeholders: which of its tokens each of them follows
    parents: tuple[int, ...] = ()
    q: Candidates | None = None  # what each draft was drawn from: see `Draft`
    scored: tuple[int, ...] = ()  # tokens of the prompt whose log probabilities are wanted, one behind the other
    first_scored: int = 0  # which of the row's tokens stands before the first of them
    num_logprobs: int = 0  # likeliest candidates that are wanted beside each of them
    next_token_id: int = -1  # what is known behind the row; -1: it is drawn
    further_tables: tuple[tuple[int, ...], ...] = ()  # block tables of the other cache groups, in their order
    lora: str | None = None  # digest of its LoRA adapter

    @property
    def context_length(self) -> int:
        """Slots that are filled when the row is computed."""
        return self.start + len(self.token_ids)


def depths_of(parents: Sequence[int]) -> list[int]:
    """How deep in the tree each token of a row with drafts stands, from `Row.parents`; the known token at 0."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


class Sample(NamedTuple):
    """One draw of a step: from the logits of query token `offset` of row `row`. A row with drafts has a draw behind each of its tokens.

    Where `sequence_id` is not that of the row, the draw begins a new sequence, forked off the row's as it was before its own draw: the
    draws of a row stand one after the other, its own last.

    The draw's noise is a function of (`seed`, `sample_index`, `position`) alone, where `position` is the place that the drawn
    token takes in its sequence.
    """

    row: int
    offset: int
    sequence_id: int
    params: SamplingParams
    seed: int
    sample_index: int
    position: int
    is_early: bool = False  # below min_tokens: neither may the stop ids of `params` be drawn
    suppressed_token_ids: tuple[
        int, ...
    ] = ()  # may not be drawn: end-of-sequence ids below min_tokens, the ends of bad words
    num_logprobs: int | None = None  # likeliest candidates wanted beside the drawn token; None: not even its own
    history: tuple[int, ...] = ()  # the known tokens, prompt first, where a penalty counts them
    num_prompt_tokens: int = 0  # of the history
    drafts: tuple[int, ...] = ()  # what stands between the known tokens and the draw, where anything asks


@dataclass(frozen=True)
class StepPlan:
    """One step, in the order in which it happens: swap-out, swap-in, block copies, then the rows' writes and reads, then the draws.

    Swap-out comes first because the blocks that it frees are handed out again in the same step. Each list is ready for batches: no
    block is a destination twice, and in a list of copies no source is a destination before it was read.
    """

    step_id: int
    rows: tuple[Row, ...]
    samples: tuple[Sample, ...]
    swap_out: tuple[tuple[int, int], ...] = ()  # (block, host block)
    swap_in: tuple[tuple[int, int], ...] = ()  # (host block, block)
    copies: tuple[tuple[int, int], ...] = ()  # (source block, destination block): copy-on-write
    preempted: tuple[str, ...] = ()  # ids of the requests that gave up their blocks for this step
    draft_depth: int | None = (
        None  # tokens ahead that a device drafter drafts; 0: it only computes the step's tokens; None: it is off
    )

    @cached_property
    def verifies(self) -> bool:
        """Whether any row has drafts."""
        return not self.is_multi_step and any([row.parents for row in self.rows])

    @cached_property
    def is_multi_step(self) -> bool:
        """Whether rows go on with what they draw: see `StepLimits.num_steps`."""
        return any([row.token_ids[-1] == PLACEHOLDER for row in self.rows])

    @cached_property
    def branches(self) -> bool:
        """Whether the drafts of any row are no chain."""
        return any([row.parents != tuple(range(len(row.parents))) for row in self.rows if row.parents])

    @cached_property
    def num_tokens(self) -> int:
        return sum([len(row.token_ids) for row in self.rows])

    @cached_property
    def decodes(self) -> bool:
        """Whether its own sequence draws behind every token: no prompt goes on, and no sequence forks."""
        drawing = [row.sequence_id for row in self.rows for _ in row.token_ids]
        return [sample.sequence_id for sample in self.samples] == drawing


@dataclass(frozen=True)
class StepResult:
    """What the device drew, one entry per `StepPlan.samples`. Log probabilities are natural logarithms of the raw softmax.

    A negative token id says why none was drawn: see `NOT_FINITE` and `NOTHING_ALLOWED`.
    """

    token_ids: npt.NDArray[np.int32]  # [B]
    logprobs: npt.NDArray[np.float32]  # [B] of the drawn token
    ranks: npt.NDArray[np.int32]  # [B] of the drawn token, 1 = likeliest; 0 where no sample of the step asks
    top_token_ids: npt.NDArray[np.int32]  # [B, W]
    top_logprobs: npt.NDArray[np.float32]  # [B, W]
    paths: npt.NDArray[np.int32] | None = (
        None  # [B, Q] of rows with drafts: the draws that count, in order; -1 behind the last
    )
    draft_candidates: npt.NDArray[np.int32] | None = None  # of a device drafter, for its proposer; padded at the end
    scored: StepResult | None = None  # of `Row.scored`: an entry per token of the stream, up to the last that is scored
