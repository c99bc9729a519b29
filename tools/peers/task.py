"""Defines the task of every engine, and its answer.

Both are JSON: the task on standard input, the answer on the last line of standard output.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Prompts = Sequence[Sequence[int]]
Generate = Callable[
    [Prompts, Sequence[int]], list[list[int]]
]  # prompts, tokens of each output; greedy, ended by length alone
FIRST_TOKENS = 4  # what a run draws before it is timed, of each output


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
        prompt: The tokens of the long prompt.
        threads: The cores to use.
        mode: Settings of the engine that are tried one after the other.
    """

    model: str
    dtype: str
    trace: list[tuple[list[int], int]]
    rows: list[int]
    context: int
    steps: int
    prompt: int
    threads: int
    mode: dict[str, Any] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Returns the most tokens of a sequence, its prompt included."""
        lengths = [len(prompt) + length for prompt, length in self.trace]
        return max(*lengths, self.context + self.steps + FIRST_TOKENS, self.prompt + FIRST_TOKENS)

    @property
    def most_rows(self) -> int:
        """Returns the most sequences at the same time."""
        return max(len(self.trace), *self.rows)


@dataclass
class Answer:
    """Holds what one process of an engine measured, in seconds.

    Attributes:
        version: The version of the engine.
        trace: The time of all requests of the trace.
        outputs: The output tokens of each request of the trace.
        steps: The time of a decode step, by number of rows.
        prompt: The time of the long prompt and the token after it.
    """

    version: str
    trace: float
    outputs: list[list[int]]
    steps: dict[int, float]
    prompt: float


def answer(task: Task, version: str, generate: Generate) -> None:
    """Runs everything and prints the answer.

    A decode step is timed by runs that differ in `steps` tokens of each output, two of each: the
    faster ones count, since a pause of the machine only makes a run longer. Each cell begins with
    a short run that is not timed.
    """
    prompts, lengths = [prompt for prompt, _ in task.trace], [length for _, length in task.trace]
    generate(prompts, [min(FIRST_TOKENS, length) for length in lengths])
    trace, outputs = _timed(generate, prompts, lengths)
    steps = {}
    for rows in task.rows:
        uniform = [_prompt(task.context, row) for row in range(rows)]
        generate(uniform[:1] * rows, [FIRST_TOKENS] * rows)
        few, many = (
            min(_timed(generate, uniform, [length] * rows)[0] for _ in range(2))
            for length in (2, 2 + task.steps)
        )
        steps[rows] = (many - few) / task.steps
    long_prompt = [_prompt(task.prompt, 0)]
    generate(long_prompt, [1])
    prompt = min(_timed(generate, long_prompt, [1])[0] for _ in range(2))
    print(json.dumps(asdict(Answer(version, trace, outputs, steps, prompt))))


def read_task() -> Task:
    """Returns the task on standard input."""
    return Task(**json.load(sys.stdin))


def _prompt(length: int, row: int) -> list[int]:
    return [(7 * row + 3 * place) % 251 + 3 for place in range(length)]


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
