"""From what the device drew to what should happen: each draw goes to the strategy of its sequence."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from jaxpage.decoding.edits import Edit, Finish, Fork
from jaxpage.decoding.sampling import SamplingStrategy
from jaxpage.outputs import TokenLogprobs
from jaxpage.scheduling.plan import StepPlan, StepResult

logger = logging.getLogger(__name__)


def advance(plan: StepPlan, result: StepResult, strategies: Mapping[int, SamplingStrategy]) -> list[Edit]:
    """The edits of a step, in the order of its samples.

    Args:
        strategies: by sequence id. Draws of a sequence that has none (its request was aborted) are passed over.
    """
    edits: list[Edit] = []
    for index, (sample, token_id) in enumerate(zip(plan.samples, result.token_ids.tolist(), strict=True)):
        strategy = strategies.get(sample.sequence_id)
        if strategy is None:
            continue
        if (parent_id := plan.rows[sample.row].sequence_id) != sample.sequence_id:
            edits.append(Fork(parent_id, sample.sequence_id, sample.sample_index))
        if token_id < 0:  # the logits hold no number to choose by: weights or activations that overflowed
            edits.append(Finish(sample.sequence_id, "error", "the model's logits are not finite"))
            continue
        num_logprobs = sample.params.num_logprobs
        logprobs = None if num_logprobs is None else _logprobs(result, index, num_logprobs)
        try:
            edits += strategy.advance(sample.sequence_id, token_id, logprobs)
        except Exception as error:  # of one request: it ends, and nobody else notices
            logger.exception("sequence %d ends with an error", sample.sequence_id)
            edits.append(Finish(sample.sequence_id, "error", f"{type(error).__name__}: {error}"))
    return edits


def _logprobs(result: StepResult, index: int, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=int(result.token_ids[index]),
        logprob=float(result.logprobs[index]),
        rank=int(result.ranks[index]),
        top_token_ids=tuple(result.top_token_ids[index, :num_top].tolist()),
        top_logprobs=tuple(result.top_logprobs[index, :num_top].tolist()),
    )
