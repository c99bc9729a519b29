"""Times one start from inside: `python -m jaxpage.bench.studies.startup_process`.

It reads settings as JSON from standard input. It prints one JSON object. `phases` has the beginning
of each phase and of the first token, in seconds since the epoch; `waking` has the seconds from
sleep to a token, by level. Or `error` says why the engine cannot start.
"""

# ruff: noqa: E402, the imports are what is timed
from __future__ import annotations

import time

# The parent subtracts its own time, and two processes have only the wall clock in common.
_BEGAN = time.time()

import json
import sys

import jax  # noqa: F401, timed apart from our own modules

_IMPORTED_JAX = time.time()

import jaxpage.llm  # noqa: F401, as a program that generates does
from jaxpage import EngineConfig, SamplingParams
from jaxpage.assembly import Hooks, weights_for_waking
from jaxpage.engine import Engine
from jaxpage.errors import JaxpageError
from jaxpage.replay import open_engine

PROMPT = [1, 2, 3]  # token ids, because a model may have no tokenizer


def main() -> None:
    """Starts an engine, draws one token, has it sleep and wake, and prints the times."""
    marks = {"importing jax": _BEGAN, "importing jaxpage": _IMPORTED_JAX}

    def begin(phase: str) -> None:
        marks[phase] = time.time()

    try:
        built = open_engine(EngineConfig(**json.load(sys.stdin)), Hooks(phase=begin))
        engine = built.engine
        begin("the first token")
        _draw(engine)
        begin("end")
        waking = {}
        for level in (1, 2):
            engine.sleep(level)
            began = time.time()
            engine.wake(weights_for_waking(built.model, built.spec, engine.runner))
            _draw(engine)
            waking[f"awake after sleep, level {level}"] = time.time() - began
        engine.report_end()
        engine.close()
    except JaxpageError as error:
        print(json.dumps({"error": str(error)}))
    else:
        print(json.dumps({"phases": marks, "waking": waking}))


def _draw(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    request = engine.add("one", engine.prepare(None, PROMPT, params))
    while not request.finished:
        engine.step()


if __name__ == "__main__":
    main()
