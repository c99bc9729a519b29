"""Beam search by its definition, in float64 over whole arrays and without sequence ids, forks or
drops: the oracle of BeamStrategy.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from jaxpage.outputs import TokenLogprobs
from jaxpage.settings.sampling_params import BeamSearchParams

LogprobsOf = Callable[[tuple[int, ...]], np.ndarray]  # of every token behind these output tokens


class Found(NamedTuple):
    """A hypothesis: what is returned of a search."""

    token_ids: tuple[int, ...]
    score: float


def naive_search(
    logprobs_of: LogprobsOf, beam: BeamSearchParams, ends: Collection[int], max_tokens: int
) -> list[Found]:
    """Returns the best hypotheses, the best first.

    They are those that end with a token of `ends` or have `max_tokens` tokens.
    """
    width = beam.beam_width
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    done: list[Found] = []
    for length in range(1, max_tokens + 1):
        scored = [
            ((*tokens, token), total + float(logprob))
            for tokens, total in live
            for token, logprob in enumerate(logprobs_of(tokens))
            if logprob > -np.inf
        ]
        order = np.argsort([-total for _, total in scored], kind="stable")
        for place in order[:width]:
            tokens, total = scored[place]
            if tokens[-1] in ends or length == max_tokens:
                done.append(Found(tokens, total / length**beam.length_penalty))
        done = sorted(done, key=lambda hypothesis: hypothesis.score, reverse=True)[:width]
        live = [scored[place] for place in order if scored[place][0][-1] not in ends][:width]
        if not live or length == max_tokens:
            break
        if len(done) == width:
            if width == 1 or beam.early_stopping is True:
                break
            hoped_for = (
                max_tokens if beam.early_stopping == "never" and beam.length_penalty > 0 else length
            )
            if live[0][1] / hoped_for**beam.length_penalty <= done[-1].score:
                break
    return done[: beam.n or width]


def all_hypotheses(
    logprobs_of: LogprobsOf, length_penalty: float, ends: Collection[int], max_tokens: int
) -> list[Found]:
    """Returns every hypothesis that there is, the best first."""
    hypotheses: list[Found] = []

    def visit(tokens: tuple[int, ...], total: float) -> None:
        if tokens and (tokens[-1] in ends or len(tokens) == max_tokens):
            hypotheses.append(Found(tokens, total / len(tokens) ** length_penalty))
            return
        for token, logprob in enumerate(logprobs_of(tokens)):
            visit((*tokens, token), total + float(logprob))

    visit((), 0.0)
    return sorted(hypotheses, key=lambda hypothesis: hypothesis.score, reverse=True)


def random_logprobs(key: object, num_token_ids: int, spread: float = 2.0) -> np.ndarray:
    """Returns float32 log probabilities that are a function of the key."""
    rng = np.random.default_rng(zlib.crc32(repr(key).encode()))
    logits = spread * rng.standard_normal(num_token_ids)
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


def best_tokens(logprobs: np.ndarray, count: int) -> TokenLogprobs:
    """Returns what the device tells of a draw."""
    order = np.argsort(-logprobs, kind="stable")[:count]
    top = tuple(float(logprobs[token]) for token in order)
    return TokenLogprobs(int(order[0]), top[0], 1, tuple(order.tolist()), top)
