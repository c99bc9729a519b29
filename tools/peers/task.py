"""Defines the task of every engine, and its answer.

Both are JSON: the task on standard input, the answer on the last line of standard output.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Prompts = Sequence[Sequence[int]]
Generate = Callable[
    [Prompts, Sequence[int]], list[list[int]]
]  # prompts, tokens of each output; greedy, ended by length alone


@dataclass
class Task:
    """Holds what an engine is asked.

    Attributes:
        model: A directory in Hugging Face's format.
        dtype: float32 or bfloat16, or another type that the engine knows.
        trace: The prompt and the number of output tokens of each request.
        rows: The numbers of rows of uniform decode.
        context: The tokens of each prompt of uniform decode.
        steps: The steps of uniform decode that are timed.
        threads: The cores to use.
        settings: Settings of jaxpage.
    """

    model: str
    dtype: str
    trace: list[tuple[list[int], int]]
    rows: list[int]
    context: int
    steps: int
    threads: int
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answer:
    """Holds what an engine measured.

    Attributes:
        version: The version of the engine.
        seconds: The time of the trace, the better of two runs.
        outputs: The output tokens of each request of the trace.
        step_seconds: The time of a decode step, by number of rows.
    """

    version: str
    seconds: float
    outputs: list[list[int]]
    step_seconds: dict[int, float]


def answer(task: Task, version: str, generate: Generate) -> None:
    """Runs everything and prints the answer.

    A decode step is timed by two runs that differ in `steps` tokens of each output; the median of
    three such pairs counts.
    """
    generate([[1, 2, 3]] * 2, [2, 2])  # what happens only once happens here
    prompts, lengths = [prompt for prompt, _ in task.trace], [length for _, length in task.trace]
    runs = [_timed(generate, prompts, lengths) for _ in range(2)]
    step_seconds = {}
    for rows in task.rows:
        uniform = [
            [(7 * row + 3 * place) % 251 + 3 for place in range(task.context)]
            for row in range(rows)
        ]
        pairs = [
            [_timed(generate, uniform, [length] * rows)[0] for length in (2, 2 + task.steps)]
            for _ in range(3)
        ]
        step_seconds[rows] = statistics.median(many - few for few, many in pairs) / task.steps
    print(
        json.dumps(
            asdict(Answer(version, min(seconds for seconds, _ in runs), runs[0][1], step_seconds))
        )
    )


def read_task() -> Task:
    """Returns the task on standard input."""
    return Task(**json.load(sys.stdin))


def _timed(
    generate: Generate, prompts: Prompts, lengths: Sequence[int]
) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    outputs = generate(prompts, lengths)
    seconds = time.perf_counter() - start
    assert [len(output) for output in outputs] == list(lengths), (
        "an output of another length is other work"
    )
    return seconds, outputs
