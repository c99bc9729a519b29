"""Requests that arrive over time, with lengths distributed as in the PagedAttention paper's traces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpage.bench.workloads import DATASETS, Lengths

TRANSLATION_MEAN_INPUT, TRANSLATION_MEAN_OUTPUT, TRANSLATION_SHAPE = (
    30.0,
    40.0,
    3.0,
)  # Gamma; guesses for sentences of news
CHAT_INPUT, CHAT_MOST_OUTPUT = 1024, 1024


@dataclass(frozen=True)
class Arrival:
    """One request of a trace. All its samples have the same length, as in the paper's figure 15."""

    seconds: float  # since the trace began
    num_prompt_tokens: int
    num_output_tokens: int
    num_samples: int = 1  # or beams
    is_beam_search: bool = False
    # of the prompt: the first tokens, which all such requests have in common
    num_prefix_tokens: int = 0


def _chat(
    draw: np.random.Generator, count: int, max_input: int, max_output: int
) -> tuple[Lengths, Lengths]:
    """Chats that are long already: each prompt is what the cut leaves of a history, and the answer is one of ShareGPT's."""
    _, outputs = DATASETS["sharegpt"](draw, count, max_input, min(max_output, CHAT_MOST_OUTPUT))
    return np.full(count, min(max_input, CHAT_INPUT)), outputs


def _translation(
    draw: np.random.Generator, count: int, max_input: int, max_output: int
) -> tuple[Lengths, Lengths]:
    """Sentences of news, without the examples before them."""
    means = (TRANSLATION_MEAN_INPUT, max_input), (TRANSLATION_MEAN_OUTPUT, max_output)
    inputs, outputs = (
        np.clip(
            np.rint(draw.gamma(TRANSLATION_SHAPE, mean / TRANSLATION_SHAPE, count)), 1, most
        ).astype(np.int64)
        for mean, most in means
    )
    return inputs, outputs


LENGTHS = {**DATASETS, "chat": _chat, "translation": _translation}


def poisson_trace(
    dataset: str,
    *,
    rate: float,
    seconds: float,
    seed: int,
    num_samples: int = 1,
    is_beam_search: bool = False,
    num_prefix_tokens: int = 0,
    max_input: int = 1024,
    max_total: int = 2048,
) -> list[Arrival]:
    """Arrivals of a Poisson process in order of time. The same seed, the same trace.

    Args:
        dataset: whose lengths: a key of `LENGTHS`.
        rate: requests per second.
        num_prefix_tokens: that all prompts begin with, before the lengths that the dataset has.
        max_input, max_total: longest prompt, longest prompt and output together; what is longer is cut.
    """
    draw = np.random.default_rng(seed)
    times = np.sort(draw.uniform(0.0, seconds, draw.poisson(rate * seconds)))
    inputs, outputs = LENGTHS[dataset](draw, len(times), max_input, max_total - 1)
    inputs = inputs + num_prefix_tokens
    outputs = np.minimum(outputs, max_total - inputs)
    kind = num_samples, is_beam_search, num_prefix_tokens
    return [
        Arrival(time, num_input, num_output, *kind)
        for time, num_input, num_output in zip(
            times.tolist(), inputs.tolist(), outputs.tolist(), strict=True
        )
    ]
