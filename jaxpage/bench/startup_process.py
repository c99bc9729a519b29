"""Times one start from inside: `python -m jaxpage.bench.startup_process`.

It reads settings as JSON from standard input. It prints one JSON object with the beginning of each
phase and of the first token, in seconds since the epoch; or with `error`, which says why the engine
cannot start.
"""

# ruff: noqa: E402, the imports are what is timed
from __future__ import annotations

import time

_BEGAN = time.time()

import json
import sys

import jax  # noqa: F401, timed apart from our own modules

_IMPORTED_JAX = time.time()

import jaxpage.llm  # noqa: F401, as a program that generates does
from jaxpage import EngineConfig, SamplingParams
from jaxpage.assembly import Hooks
from jaxpage.errors import JaxpageError
from jaxpage.replay import open_engine

PROMPT = [1, 2, 3]  # token ids, because a model may have no tokenizer


def main() -> None:
    """Starts an engine, draws one token, and prints the times."""
    marks = {"importing jax": _BEGAN, "importing jaxpage": _IMPORTED_JAX}

    def begin(phase: str) -> None:
        marks[phase] = time.time()

    try:
        engine = open_engine(EngineConfig(**json.load(sys.stdin)), Hooks(phase=begin)).engine
        begin("the first token")
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        request = engine.add("first", engine.prepare(None, PROMPT, params))
        while not request.finished:
            engine.step()
        begin("end")
        engine.events.closed()
        engine.runner.close()
        engine.grammars.close()
    except JaxpageError as error:
        print(json.dumps({"error": str(error)}))
    else:
        print(json.dumps(marks))


if __name__ == "__main__":
    main()
