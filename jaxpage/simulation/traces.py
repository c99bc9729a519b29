"""Makes requests that arrive over time, with lengths like those in the PagedAttention paper."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpage.bench import DATASETS, Lengths

# A Gamma distribution with this shape; the numbers are guesses for sentences of news.
TRANSLATION_MEAN_INPUT = 30.0
TRANSLATION_MEAN_OUTPUT = 40.0
TRANSLATION_SHAPE = 3.0
CHAT_INPUT = 1024
CHAT_MAX_OUTPUT = 1024


@dataclass(frozen=True)
class Arrival:
    """A request of a trace. All its samples have the same length, as in the paper's figure 15.

    Attributes:
        seconds: The time since the beginning of the trace.
        num_prompt_tokens: The length of the prompt, with its prefix.
        num_output_tokens: The length of each sample.
        num_samples: The samples, or the beams.
        is_beam_search: Says whether the samples are the beams of a search.
        num_prefix_tokens: The first tokens of the prompt, which all such requests share.
    """

    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_samples: int = 1
    is_beam_search: bool = False
    num_prefix_tokens: int = 0


def _chat(
    draw: np.random.Generator, count: int, max_input: int, max_output: int
) -> tuple[Lengths, Lengths]:
    """Draws the lengths of chats that are long already.

    Each prompt is the history after the cut, and each answer has a length of ShareGPT's.
    """
    _, outputs = DATASETS["sharegpt"](draw, count, max_input, min(max_output, CHAT_MAX_OUTPUT))
    return np.full(count, min(max_input, CHAT_INPUT)), outputs


def _translation(
    draw: np.random.Generator, count: int, max_input: int, max_output: int
) -> tuple[Lengths, Lengths]:
    """Draws the lengths of sentences of news, without the examples before them."""
    means = (TRANSLATION_MEAN_INPUT, max_input), (TRANSLATION_MEAN_OUTPUT, max_output)
    inputs, outputs = (
        np.clip(
            np.rint(draw.gamma(TRANSLATION_SHAPE, mean / TRANSLATION_SHAPE, count)), 1, maximum
        ).astype(np.int64)
        for mean, maximum in means
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
    """Returns arrivals of a Poisson process in order of time; the same seed gives the same trace.

    Args:
        dataset: The distribution of the lengths, a key of `LENGTHS`.
        rate: The requests per second.
        seconds: The length of the trace.
        seed: The seed of times and lengths.
        num_samples: The samples, or beams, of every request.
        is_beam_search: Says whether the samples are the beams of a search.
        num_prefix_tokens: The tokens that all prompts begin with, before those of the dataset.
        max_input: The longest prompt of the dataset; longer ones are cut.
        max_total: The longest prompt and output together; longer outputs are cut.
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
