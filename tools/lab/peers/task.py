"""Defines the task of every engine, and its answer.

Both are JSON: the task on standard input, the answer on the last line of standard output.
"""

from __future__ import annotations

import json
import math
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
MAX_RUNS = 3  # of which the fastest counts
SECONDS_OF_RUNS = 20.0  # slow runs are repeated less often
TRACE, PROMPT = "trace", "prompt"  # the names of two numbers; `rows_name` has the others


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
        numbers: The names of the numbers that are wanted.
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
    numbers: list[str]
    mode: dict[str, Any] = field(default_factory=dict)

    @property
    def max_length(self) -> int:
        """Returns the most tokens of a sequence, its prompt included."""
        lengths = [len(prompt) + length for prompt, length in self.trace]
        return max(*lengths, self.context + self.steps + FIRST_TOKENS, self.prompt + FIRST_TOKENS)

    @property
    def max_rows(self) -> int:
        """Returns the most sequences at the same time."""
        return max(len(self.trace), *self.rows)


@dataclass
class Answer:
    """Holds what one process of an engine measured.

    Attributes:
        version: The version of the engine.
        outputs: The output tokens of each request of the trace, if it was asked for.
        seconds: The time of all requests of the trace, of the long prompt with the token after it,
            and of a decode step for each number of rows, by name. It is infinite where it could
            not be measured.
    """

    version: str
    outputs: list[list[int]]
    seconds: dict[str, float]


def rows_name(rows: int) -> str:
    """Returns the name of the time of a decode step with this number of rows."""
    return "1 row" if rows == 1 else f"{rows} rows"


def answer(task: Task, version: str, generate: Generate) -> None:
    """Runs what is wanted, and prints the answer.

    The fastest of some runs counts, since a pause of the machine only makes a run longer. A decode
    step is the difference of two runs that differ in `steps` tokens of each output; it is infinite
    where pauses made the shorter run the longer one. Each number begins with a short run that is
    not timed.
    """
    seconds = dict[str, float]()
    outputs: list[list[int]] = []
    if TRACE in task.numbers:
        prompts = [prompt for prompt, _ in task.trace]
        lengths = [length for _, length in task.trace]
        generate(prompts, [min(FIRST_TOKENS, length) for length in lengths])
        seconds[TRACE], outputs = _time(generate, prompts, lengths)
    for rows in task.rows:
        if rows_name(rows) in task.numbers:
            uniform = [_prompt(task.context, row) for row in range(rows)]
            generate([prompt[:3] for prompt in uniform], [FIRST_TOKENS] * rows)
            few, many = _fastest(generate, uniform, [2, 2 + task.steps])
            seconds[rows_name(rows)] = (many - few) / task.steps if many > few else math.inf
    if PROMPT in task.numbers:
        first_prompt = [_prompt(task.prompt, 0)]
        generate(first_prompt, [1])
        (seconds[PROMPT],) = _fastest(generate, first_prompt, [1])
    print(json.dumps(asdict(Answer(version, outputs, seconds))))


def _fastest(generate: Generate, prompts: Prompts, lengths: Sequence[int]) -> list[float]:
    """Returns the fastest time for each length of all outputs."""
    runs: list[list[float]] = [[] for _ in lengths]
    started = time.perf_counter()
    for _ in range(MAX_RUNS):
        for length, times in zip(lengths, runs, strict=True):
            times.append(_time(generate, prompts, [length] * len(prompts))[0])
        if time.perf_counter() - started > SECONDS_OF_RUNS:
            break
    return [min(times) for times in runs]


def read_task() -> Task:
    """Returns the task on standard input."""
    return Task(**json.load(sys.stdin))


def _prompt(length: int, row: int) -> list[int]:
    return [(7 * row + 3 * index) % 251 + 3 for index in range(length)]


def _time(
    generate: Generate, prompts: Prompts, lengths: Sequence[int]
) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    outputs = generate(prompts, lengths)
    seconds = time.perf_counter() - start
    assert [len(output) for output in outputs] == list(lengths), (
        "an output of another length is other work"
    )
    return seconds, outputs
