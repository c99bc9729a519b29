"""Makes seeded workloads: prompts of random token ids with the lengths of the paper's traces.

The PagedAttention paper prints only means. ShareGPT's spread of outputs follows from the paper's
figure 2 (seven slots of 2,048 are always full). Its spread of inputs is a guess, which changes
results little. For Alpaca both are guesses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]

# This one is lognormal; the variation is the standard deviation over the mean.
SHAREGPT_MEAN_INPUT = 161.0
SHAREGPT_INPUT_VARIATION = 1.3
# The shapes are those of Gamma distributions.
SHAREGPT_MEAN_OUTPUT = 338.0
SHAREGPT_OUTPUT_SHAPE = 1.306
ALPACA_MEAN_INPUT = 19.31
ALPACA_INPUT_SHAPE = 6.0
ALPACA_MEAN_OUTPUT = 58.45
ALPACA_OUTPUT_SHAPE = 0.9

SHORT_PROMPT = 16  # tokens of the prompt of a row whose decode steps are timed


@dataclass(frozen=True)
class WorkItem:
    """A request: a prompt, and the exact number of tokens to generate for it.

    Attributes:
        prompt_token_ids: The prompt.
        num_output_tokens: The length of the output.
        seconds: The time of the arrival since the beginning, in a timed trace.
        after: The index of the round before, in a chat. The prompt begins with that round's prompt
            and output.
    """

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    seconds: float | None = None
    after: int | None = None


def _sharegpt(
    draw: np.random.Generator, count: int, max_input: int, max_output: int
) -> tuple[Lengths, Lengths]:
    # The logarithm of a lognormal has the variance ln(1 + variation ** 2), and the mean is exp(mu +
    # variance / 2).
    variance = np.log1p(SHAREGPT_INPUT_VARIATION**2)
    inputs = draw.lognormal(np.log(SHAREGPT_MEAN_INPUT) - variance / 2, np.sqrt(variance), count)
    # The mean of a Gamma distribution is its shape times its scale.
    outputs = draw.gamma(SHAREGPT_OUTPUT_SHAPE, SHAREGPT_MEAN_OUTPUT / SHAREGPT_OUTPUT_SHAPE, count)
    return _whole(inputs, max_input), _whole(outputs, max_output)


def _alpaca(
    draw: np.random.Generator, count: int, max_input: int, max_output: int
) -> tuple[Lengths, Lengths]:
    inputs = draw.gamma(ALPACA_INPUT_SHAPE, ALPACA_MEAN_INPUT / ALPACA_INPUT_SHAPE, count)
    outputs = draw.gamma(ALPACA_OUTPUT_SHAPE, ALPACA_MEAN_OUTPUT / ALPACA_OUTPUT_SHAPE, count)
    return _whole(inputs, max_input), _whole(outputs, max_output)


def _random(
    draw: np.random.Generator, count: int, max_input: int, max_output: int
) -> tuple[Lengths, Lengths]:
    """Draws lengths uniformly from a tenth of the longest to the longest."""
    inputs = draw.integers(max(1, max_input // 10), max_input, count, endpoint=True)
    outputs = draw.integers(max(1, max_output // 10), max_output, count, endpoint=True)
    return inputs, outputs


def _whole(lengths: npt.NDArray[np.float64], max_length: int) -> Lengths:
    return np.clip(np.rint(lengths), 1, max_length).astype(np.int64)


DATASETS: dict[str, Callable[[np.random.Generator, int, int, int], tuple[Lengths, Lengths]]] = {
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "random": _random,
}


def make_workload(
    dataset: str, num_prompts: int, *, seed: int, vocab_size: int, max_input: int, max_output: int
) -> list[WorkItem]:
    """Returns `num_prompts` requests with the lengths of a dataset (a key of `DATASETS`).

    Lengths are cut at the caps. The same seed gives the same work.
    """
    draw = np.random.default_rng(seed)
    inputs, outputs = DATASETS[dataset](draw, num_prompts, max_input, max_output)
    return [
        WorkItem(tuple(draw.integers(0, vocab_size, length).tolist()), int(num_output))
        for length, num_output in zip(inputs, outputs, strict=True)
    ]


def prefix_repetition(
    num_prompts: int,
    *,
    seed: int,
    vocab_size: int,
    max_input: int,
    max_output: int,
    num_prefixes: int,
    prefix_len: int,
) -> list[WorkItem]:
    """Returns requests that share `num_prefixes` prefixes in turn, each with a suffix of its own.

    The suffixes and outputs have the lengths of `random`.
    """
    draw = np.random.default_rng(seed)
    prefixes = draw.integers(0, vocab_size, (num_prefixes, prefix_len)).tolist()
    suffixes = make_workload(
        "random",
        num_prompts,
        # The suffixes must not repeat the random numbers of the prefixes.
        seed=seed + 1,
        vocab_size=vocab_size,
        max_input=max_input - prefix_len,
        max_output=max_output,
    )
    return [
        WorkItem(
            (*prefixes[index % num_prefixes], *suffix.prompt_token_ids), suffix.num_output_tokens
        )
        for index, suffix in enumerate(suffixes)
    ]


def chat(
    num_prompts: int,
    *,
    seed: int,
    vocab_size: int,
    max_input: int,
    max_output: int,
    num_rounds: int,
) -> list[WorkItem]:
    """Returns conversations of `num_rounds` rounds: all first rounds, then all second rounds.

    Messages and answers have the lengths of `random`, short enough that the last prompt has at most
    `max_input` tokens. The answers within the prompts are random tokens.
    """
    count = -(-num_prompts // num_rounds)
    max_length = max_input // (2 * num_rounds)
    messages = make_workload(
        "random",
        count * num_rounds,
        seed=seed,
        vocab_size=vocab_size,
        max_input=max_length,
        max_output=min(max_length, max_output),
    )
    # The answers must not repeat the random numbers of the messages.
    draw = np.random.default_rng(seed + 1)
    work: list[WorkItem] = []
    for index, message in enumerate(messages[:num_prompts]):
        prompt = message.prompt_token_ids
        after = index - count if index >= count else None
        if after is not None:
            before = work[after]
            answer = draw.integers(0, vocab_size, before.num_output_tokens).tolist()
            prompt = (*before.prompt_token_ids, *answer, *prompt)
        work.append(WorkItem(prompt, message.num_output_tokens, after=after))
    return work
