"""One start, timed from inside: `python -m jaxpage.bench.startup_process`, with settings as JSON on standard input.

Prints one JSON object: when each phase began, in seconds since the epoch, and when the first token was there; or `error`, why it
cannot start.
"""

# ruff: noqa: E402, the imports are what is timed
from __future__ import annotations

import time

_BEGAN = time.time()

import functools
import json
import sys

import jax  # noqa: F401, timed apart from what is ours

_IMPORTED_JAX = time.time()

from jaxpage import LLM, SamplingParams, llm
from jaxpage.errors import JaxpageError
from jaxpage.replay.opening import open_engine

PROMPT = [1, 2, 3]  # token ids: a model may have no tokenizer


def main() -> None:
    marks = {"importing jax": _BEGAN, "importing jaxpage": _IMPORTED_JAX}

    def begin(phase: str) -> None:
        marks[phase] = time.time()

    setattr(llm, "open_engine", functools.partial(open_engine, phase=begin))  # noqa: B010, `LLM` has no argument for it
    try:
        with LLM(**json.load(sys.stdin), use_tqdm=False, verbose=False) as engine:
            begin("the first token")
            engine.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), use_tqdm=False)
            begin("end")
    except JaxpageError as error:
        print(json.dumps({"error": str(error)}))
    else:
        print(json.dumps(marks))


if __name__ == "__main__":
    main()
