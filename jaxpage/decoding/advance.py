"""From what the device drew to what should happen: the draws of a request go to its strategy."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import groupby

from jaxpage.decoding.constraints import Words
from jaxpage.decoding.edits import Edit, Finish, Fork
from jaxpage.decoding.strategy import Draw, Strategy
from jaxpage.outputs import TokenLogprobs
from jaxpage.scheduling.plan import Sample, StepPlan, StepResult

logger = logging.getLogger(__name__)


def masks_of(plan: StepPlan, strategies: Mapping[int, Strategy]) -> dict[int, Words]:
    """By place among the plan's samples: what the grammars of their requests admit. Requests without one are not asked."""
    masks = {}
    for index, sample in enumerate(plan.samples):
        if sample.params.structured_outputs is not None:
            mask = strategies[sample.sequence_id].mask(sample.sequence_id)
            if mask is not None:
                masks[index] = mask
    return masks


def advance(plan: StepPlan, result: StepResult, strategies: Mapping[int, Strategy]) -> list[Edit]:
    """The edits of a step, in the order of its samples.

    Args:
        strategies: by sequence id. Draws of a sequence that has none (its request was aborted) are passed over.
    """
    edits: list[Edit] = []
    for strategy, drawn in groupby(enumerate(plan.samples), lambda item: strategies.get(item[1].sequence_id)):
        if strategy is None:
            continue
        draws = []
        for index, sample in drawn:
            draws.append(_draw(result, index, sample))
            if (parent_id := plan.rows[sample.row].sequence_id) != sample.sequence_id:
                edits.append(Fork(parent_id, sample.sequence_id, sample.sample_index))
        try:
            edits += strategy.advance(draws)
        except Exception as error:  # of one request: it ends, and nobody else notices
            logger.exception("sequence %d ends with an error, and with it its request", draws[0].sequence_id)
            edits += [Finish(draw.sequence_id, "error", f"{type(error).__name__}: {error}") for draw in draws]
    return edits


def _draw(result: StepResult, index: int, sample: Sample) -> Draw:
    token_id, num_top = int(result.token_ids[index]), sample.num_logprobs
    logprobs = None if num_top is None or token_id < 0 else _logprobs(result, index, num_top)
    return Draw(sample.sequence_id, token_id, logprobs)


def _logprobs(result: StepResult, index: int, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=int(result.token_ids[index]),
        logprob=float(result.logprobs[index]),
        rank=int(result.ranks[index]),
        top_token_ids=tuple(result.top_token_ids[index, :num_top].tolist()),
        top_logprobs=tuple(result.top_logprobs[index, :num_top].tolist()),
    )
