"""Makes the arrays that the logits processors of a step read.

They say which tokens may be drawn, which ones have a bias, and which ones the text has already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpage.device.inputs import ProcessorInputs, processor_shapes
from jaxpage.step.plan import Sample
from jaxpage.step.token_masks import Mask, mask_of, mask_of_ids

NOTHING = ProcessorInputs(None, None, None, None)
_ALL = np.uint32(0xFFFFFFFF)


def processor_inputs_of(
    samples: tuple[Sample, ...],
    masks: Mapping[int, Mask],
    num_draws: int,
    *,
    vocab_size: int,
    context: int,
) -> ProcessorInputs:
    """Returns the arrays of a step; None for each array that no draw of the step needs.

    Args:
        samples: The draws of the step.
        masks: The tokens that a grammar admits, by the index of the draw in `samples`.
        num_draws: The number of draws in the arrays, padding included (R).
        vocab_size: The number of token ids (V).
        context: The number of tokens in a row of the history (C).
    """
    asking = [
        (i, s)
        for i, s in enumerate(samples)
        if s.params.processes_logits or s.suppressed_token_ids or i in masks
    ]
    if not asking:
        return NOTHING
    masked = [
        (index, sample)
        for index, sample in asking
        if index in masks
        or sample.suppressed_token_ids
        or sample.params.allowed_token_ids is not None
        or (sample.is_early and sample.params.stop_token_ids)
    ]
    biased = [
        (index, sample.params.logit_bias) for index, sample in asking if sample.params.logit_bias
    ]
    penalised = [(index, sample) for index, sample in asking if sample.params.penalises]
    shapes = processor_shapes(num_draws, vocab_size=vocab_size, context=context)
    mask_RU: Any = None
    if masked:
        mask_RU = np.full(shapes.mask_RU.shape, _ALL, np.uint32)
        for index, sample in masked:
            _mask(mask_RU[index], sample, masks.get(index), vocab_size)
    ids_BE: Any = None
    bias_RE: Any = None
    if biased:
        ids_BE = np.full(shapes.bias_ids_RE.shape, vocab_size, np.int32)
        bias_RE = np.zeros(shapes.bias_RE.shape, np.float32)
        for index, biases in biased:
            ids_BE[index, : len(biases)], bias_RE[index, : len(biases)] = zip(*biases, strict=True)
    history_RC: Any = None
    if penalised:
        history_RC = np.full(shapes.history_RC.shape, vocab_size, np.int32)
        last: tuple[int, ...] = ()
        known_C = np.zeros(0, np.int32)
        for index, sample in penalised:
            if sample.history is not last:  # the draws of one row share its history
                last = sample.history
                known_C = np.array(sample.history, np.int32)
            history_RC[index, : len(last)] = known_C
            history_RC[index, len(last) : len(last) + len(sample.drafts)] = sample.drafts
    return ProcessorInputs(mask_RU, ids_BE, bias_RE, history_RC)


def _mask(words: Mask, sample: Sample, mask: Mask | None, vocab_size: int) -> None:
    if (allowed := sample.params.allowed_token_ids) is not None:
        words &= mask_of_ids(allowed, vocab_size)
    if mask is not None:
        words &= mask
    if sample.is_early:
        words &= ~mask_of_ids(sample.params.stop_token_ids, vocab_size)
    if sample.suppressed_token_ids:
        words &= ~mask_of(sample.suppressed_token_ids, vocab_size)
