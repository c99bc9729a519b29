"""Gives the draws of a step to the strategies of their requests, and collects their edits."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from jaxpage.outputs import TokenLogprobs
from jaxpage.step.edits import Edit, Finish, Fork, Route, Score
from jaxpage.step.plan import Sample, StepPlan, StepResult
from jaxpage.step.strategy import Draw, Strategy
from jaxpage.step.token_masks import Mask, ids_of

logger = logging.getLogger(__name__)

_NOTHING: Mask = np.zeros(1, np.uint32)  # admits no token; NumPy repeats its one word to any width


def masks_of(plan: StepPlan, strategies: Mapping[int, Strategy]) -> dict[int, Mask]:
    """Returns the token masks of a step, keyed by the index of the draw in `plan.samples`.

    Only requests with a grammar or a budget for reasoning are asked. If a request's strategy raises
    an exception, its draw gets a mask that admits no token, which ends the request; other requests
    are not affected.
    """
    masks = {}
    for index, sample in enumerate(plan.samples):
        if sample.params.has_masks:
            try:
                mask = strategies[sample.sequence_id].mask(sample.sequence_id, sample.drafts)
            except Exception:
                logger.exception(
                    "the token mask of sequence %d could not be made; the request ends with an "
                    "error",
                    sample.sequence_id,
                )
                mask = _NOTHING
            if mask is not None:
                masks[index] = mask
    return masks


def advance(plan: StepPlan, result: StepResult, strategies: Mapping[int, Strategy]) -> list[Edit]:
    """Returns the edits of a step: the scores and routes of its rows, then those of its draws.

    Args:
        plan: The plan of the step.
        result: The result that the device returned for it.
        strategies: The strategy of each sequence, by sequence id. The draws of a sequence that has
            none are ignored.
    """
    edits: list[Edit] = [] if result.scored is None else _scores(plan, result.scored)
    if result.routes is not None:
        edits += _routes(plan, result, result.routes)
    # The rows of a request are adjacent in a plan, and so are its draws.
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
        except Exception as error:  # an error of one request must end no other request
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
    """Yields the draws that count, with their index and whether a right draft follows.

    In a row with drafts only the draws on the path of accepted drafts count.
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


def _routes(
    plan: StepPlan, result: StepResult, routes_TLX: npt.NDArray[np.int16]
) -> Iterator[Edit]:
    """Yields the routes of the tokens that stay, of each row that asks for them."""
    first = 0
    for index, row in enumerate(plan.rows):
        places = np.arange(first, first + len(row.token_ids))
        if result.paths is not None:
            places = result.paths[index][result.paths[index] >= 0]
        if row.is_routed:
            yield Route(row.sequence_id, row.start, list(routes_TLX[places]))
        first += len(row.token_ids)


def _draw(result: StepResult, index: int, sample: Sample, drafted: bool) -> Draw:
    token_id = int(result.token_ids[index])
    num_top = sample.num_logprobs
    if num_top is None or token_id < 0:
        return Draw(sample.sequence_id, token_id, None, drafted)
    logprobs = next(_logprobs(result, index, index + 1, num_top))
    if sample.params.logprobs_mode == "processed":
        logprobs = _of_kept(logprobs, result, index)
    if sample.params.return_sampling_mask and result.masks is not None:
        logprobs = replace(logprobs, mask_ids=ids_of(result.masks[index]).tobytes())
    if sample.params.return_hidden_states and result.hidden is not None:
        logprobs = replace(logprobs, hidden_state=result.hidden[index].tobytes())
    return Draw(sample.sequence_id, token_id, logprobs, drafted)


def _of_kept(logprobs: TokenLogprobs, result: StepResult, index: int) -> TokenLogprobs:
    """Returns the entry without candidates that could not be drawn, whose probability is 0."""
    assert result.num_kept is not None
    num_kept = int(result.num_kept[index])
    return replace(
        logprobs,
        top_token_ids=logprobs.top_token_ids[:num_kept],
        top_logprobs=logprobs.top_logprobs[:num_kept],
        num_kept=num_kept,
    )


def _logprobs(result: StepResult, start: int, stop: int, num_top: int) -> Iterator[TokenLogprobs]:
    """Yields the log probabilities of the entries `start` to `stop - 1`.

    One `tolist` for all of them costs less than converting them one by one.
    """
    top_token_ids = map(tuple, result.top_token_ids[start:stop, :num_top].tolist())
    top_logprobs = map(tuple, result.top_logprobs[start:stop, :num_top].tolist())
    columns = (result.token_ids, result.logprobs, result.ranks)
    return map(
        TokenLogprobs,
        *(column[start:stop].tolist() for column in columns),
        top_token_ids,
        top_logprobs,
    )
