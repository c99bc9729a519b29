"""Runs the engine end to end with each attention backend and compares tokens.

tools/lab/gpu_check.py runs it in a process of its own. In float32 (no TF32) the greedy tokens must
be those of the last backend named, the definition. In bfloat16 each request alone is compared with
the same request among others, tokens and log probabilities. This is recorded and never fails, since
on a GPU the rest of the model influences it.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import jax

# Lets the program run where jaxpage is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.lab.kernel_lab.findings import (
    FAILED,
    LEFT_OUT,
    PASSED,
    Finding,
    LeftOut,
    Table,
    append,
    judge,
)

try:
    from jaxpage import LLM, SamplingParams

    MISSING = ""
except ImportError as absent:
    MISSING = absent.name or str(absent)

PROMPTS = (
    "Once upon a time",
    "The king had a daughter, and",
    "A fox",
    "In a great forest there lived a woodcutter with his wife and his two children, who were called",
    "There was once a miller who was poor, but he had a",
)
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "enable_prefix_caching": False,
}
NUM_TOKENS = 32


def generate(backend: str, dtype: str, batches: list[list[str]]) -> list[list[Any]]:
    """Returns each prompt's (token ids, log probabilities), for each order of prompts.

    One engine computes all of them.
    """
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
    try:
        with LLM(
            model="demo", attention_backend=backend, dtype=dtype, use_tqdm=False, **SETTINGS
        ) as llm:
            outputs = [llm.generate(batch, params, use_tqdm=False) for batch in batches]
    except Exception as error:
        if any(kind.__name__ == "UnsupportedError" for kind in type(error).__mro__):
            raise LeftOut(f"attention_backend={backend!r}, dtype={dtype!r}: {error}") from error
        raise
    return [[_essence(output.outputs[0]) for output in each] for each in outputs]


def _essence(completion: Any) -> tuple[list[int], list[float]]:
    tokens = list(completion.token_ids)
    return tokens, [
        each[token].logprob for token, each in zip(tokens, completion.logprobs, strict=True)
    ]


def same_tokens(backend: str, expected: list[Any], definition: str) -> Finding:
    """Compares a backend's greedy tokens with the definition's."""
    [got] = generate(backend, "float32", [list(PROMPTS)])
    wrong = [
        index
        for index, (mine, other) in enumerate(zip(got, expected, strict=True))
        if mine[0] != other[0]
    ]
    name = f"engine {backend}: float32 tokens"
    if not wrong:
        return Finding(
            name, PASSED, f"{len(got)} requests of {NUM_TOKENS} greedy tokens as with {definition}"
        )
    data = {str(index): {backend: got[index][0], definition: expected[index][0]} for index in wrong}
    return Finding(
        name, FAILED, f"{len(wrong)} of {len(got)} requests differ from {definition}", data=data
    )


def path_independence(backend: str) -> Finding:
    """Compares each request alone with the same request among others."""
    batches = [[prompt] for prompt in PROMPTS] + [list(PROMPTS)]
    *alone, together = generate(backend, "bfloat16", batches)
    table = Table(
        f"bfloat16, {backend}: alone against together",
        ["request", "same tokens", "same log probabilities"],
    )
    for index, ((lone,), among) in enumerate(zip(alone, together, strict=True)):
        same = [
            sum(a == b for a, b in zip(x, y, strict=True)) for x, y in zip(lone, among, strict=True)
        ]
        table.rows.append([str(index), *(f"{count} of {NUM_TOKENS}" for count in same)])
    data = {"rows": table.rows}
    return Finding(
        f"engine {backend}: path independence", PASSED, "recorded", tables=[table], data=data
    )


def main(argv: list[str] | None = None) -> None:
    """Runs the checks and appends the findings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backends", nargs="+", help="the last one defines the tokens")
    parser.add_argument(
        "--to",
        type=Path,
        required=True,
        help="file to which findings are appended as lines of JSON",
    )
    arguments = parser.parse_args(argv)
    if MISSING:
        append(arguments.to, Finding("engine", LEFT_OUT, f"no {MISSING} here"))
        return
    *backends, definition = arguments.backends
    expected: list[Any] = []

    def define() -> Finding:
        expected.extend(generate(definition, "float32", [list(PROMPTS)])[0])
        return Finding(f"engine {definition}: float32 tokens", PASSED, "the definition")

    # The setting must be global, because the engine compiles in several threads.
    jax.config.update("jax_default_matmul_precision", "highest")
    append(arguments.to, judge(f"engine {definition}: float32 tokens", define))
    for backend in backends if expected else []:
        name = f"engine {backend}: float32 tokens"
        append(
            arguments.to,
            judge(name, functools.partial(same_tokens, backend, expected, definition)),
        )
    jax.config.update("jax_default_matmul_precision", None)
    for backend in backends:
        name = f"engine {backend}: path independence"
        append(arguments.to, judge(name, functools.partial(path_independence, backend)))


if __name__ == "__main__":
    main()
