"""Requests that arrive over time, with lengths distributed as in the PagedAttention paper's traces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpage.bench.workloads import DATASETS


@dataclass(frozen=True)
class Arrival:
    """One request of a trace. All its samples have the same length, as in the paper's figure 15."""

    seconds: float  # since the trace began
    num_prompt_tokens: int
    num_output_tokens: int
    num_samples: int = 1


def poisson_trace(
    dataset: str,
    *,
    rate: float,
    seconds: float,
    seed: int,
    num_samples: int = 1,
    max_input: int = 1024,
    max_total: int = 2048,
) -> list[Arrival]:
    """Arrivals of a Poisson process in order of time. The same seed, the same trace.

    Args:
        dataset: whose lengths: a key of `DATASETS`.
        rate: requests per second.
        max_input, max_total: longest prompt, longest prompt and output together; what is longer is cut.
    """
    draw = np.random.default_rng(seed)
    times = np.sort(draw.uniform(0.0, seconds, draw.poisson(rate * seconds)))
    inputs, outputs = DATASETS[dataset](draw, len(times), max_input, max_total - 1)
    return [
        Arrival(float(time), int(num_input), int(min(num_output, max_total - num_input)), num_samples)
        for time, num_input, num_output in zip(times, inputs, outputs, strict=True)
    ]
