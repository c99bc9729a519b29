"""From what the device drew to what should happen: the draws of a request go to its strategy."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import groupby

import numpy as np

from jaxpage.outputs import TokenLogprobs
from jaxpage.step.edits import Edit, Finish, Fork, Score
from jaxpage.step.plan import Sample, StepPlan, StepResult
from jaxpage.step.strategy import Draw, Strategy
from jaxpage.step.token_masks import Mask

logger = logging.getLogger(__name__)

_NOTHING: Mask = np.zeros(1, np.uint32)  # admits no token, as wide as it is made


def masks_of(plan: StepPlan, strategies: Mapping[int, Strategy]) -> dict[int, Mask]:
    """By place among the plan's samples: what the grammars of their requests admit. Requests without one are not asked.

    An exception of one request leaves it nothing to draw, which ends it; other requests are not affected.
    """
    masks = {}
    for index, sample in enumerate(plan.samples):
        if sample.params.structured_outputs is not None:
            try:
                mask = strategies[sample.sequence_id].mask(sample.sequence_id, sample.drafts)
            except Exception:
                logger.exception(
                    "the token mask of sequence %d could not be made; the request ends with an error",
                    sample.sequence_id,
                )
                mask = _NOTHING
            if mask is not None:
                masks[index] = mask
    return masks


def advance(plan: StepPlan, result: StepResult, strategies: Mapping[int, Strategy]) -> list[Edit]:
    """The edits of a step: what its rows scored, then what its samples lead to, in their order.

    Args:
        strategies: by sequence id. Draws of a sequence that has none (its request was aborted) are passed over.
    """
    edits: list[Edit] = [] if result.scored is None else _scores(plan, result.scored)
    for strategy, drawn in groupby(
        _that_count(plan, result), lambda item: strategies.get(item[1].sequence_id)
    ):
        if strategy is None:
            continue
        draws = []
        for index, sample, drafted in drawn:
            draws.append(_draw(result, index, sample, drafted))
            if (parent_id := plan.rows[sample.row].sequence_id) != sample.sequence_id:
                edits.append(Fork(parent_id, sample.sequence_id, sample.sample_index))
        try:
            edits += strategy.advance(draws)
        except Exception as error:  # of one request: it ends; other requests are not affected
            logger.exception(
                "sequence %d ends with an error, and with it its request", draws[0].sequence_id
            )
            ended = dict.fromkeys(draw.sequence_id for draw in draws)
            edits += [
                Finish(sequence_id, "error", f"{type(error).__name__}: {error}")
                for sequence_id in ended
            ]
    return edits


def _that_count(plan: StepPlan, result: StepResult) -> Iterator[tuple[int, Sample, bool]]:
    """The draws, by their place among the plan's samples, and whether a draft that is the same token follows.

    Of a row with drafts only those count that stand behind right drafts.
    """
    if result.paths is None:
        yield from ((index, sample, False) for index, sample in enumerate(plan.samples))
        return
    for path in result.paths.tolist():
        counted = [index for index in path if index >= 0]
        yield from ((index, plan.samples[index], index != counted[-1]) for index in counted)


def _scores(plan: StepPlan, scored: StepResult) -> list[Edit]:
    edits: list[Edit] = []
    first = 0
    for row in plan.rows:
        if row.scored:
            start = first + row.first_scored
            logprobs = _logprobs(scored, start, start + len(row.scored), row.num_logprobs)
            edits.append(Score(row.sequence_id, row.start + row.first_scored + 1, tuple(logprobs)))
        first += len(row.token_ids)
    return edits


def _draw(result: StepResult, index: int, sample: Sample, drafted: bool) -> Draw:
    token_id, num_top = int(result.token_ids[index]), sample.num_logprobs
    if num_top is None or token_id < 0:
        return Draw(sample.sequence_id, token_id, None, drafted)
    return Draw(
        sample.sequence_id, token_id, next(_logprobs(result, index, index + 1, num_top)), drafted
    )


def _logprobs(result: StepResult, start: int, stop: int, num_top: int) -> Iterator[TokenLogprobs]:
    """Of the entries `start` to `stop`. A list of Python numbers at once costs less than one by one."""
    top_token_ids = map(tuple, result.top_token_ids[start:stop, :num_top].tolist())
    top_logprobs = map(tuple, result.top_logprobs[start:stop, :num_top].tolist())
    columns = (result.token_ids, result.logprobs, result.ranks)
    return map(
        TokenLogprobs,
        *(column[start:stop].tolist() for column in columns),
        top_token_ids,
        top_logprobs,
    )
