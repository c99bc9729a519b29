"""A crowd for the inspector: every kind of request, some aborted, in a pool that is too small for
all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from jaxpage import BeamSearchParams, SamplingParams
from jaxpage.engine.engine import Engine

POOL = {"num_blocks": 33, "max_model_len": 256, "max_num_seqs": 8}  # two or three requests


def run_crowd(
    engine: Engine, seed: int, after_step: Callable[[], Any], *, num_requests: int = 18
) -> None:
    """Adds requests now and then, aborts some, and steps until nothing is left."""
    rng = random.Random(seed)
    prefix = [rng.randrange(1, 257) for _ in range(50)]
    waiting = [_request(rng, prefix) for _ in range(num_requests)]
    added = 0
    while engine.has_unfinished or waiting:
        while waiting and (not engine.has_unfinished or rng.random() < 0.5):
            engine.add(f"request-{added}", engine.prepare(None, *waiting.pop()))
            added += 1
        if rng.random() < 0.02:
            engine.abort(f"request-{rng.randrange(max(1, added))}")
        if engine.has_unfinished:
            engine.step()
            after_step()


def _request(
    rng: random.Random, prefix: list[int]
) -> tuple[list[int], SamplingParams | BeamSearchParams]:
    ending = [rng.randrange(1, 257) for _ in range(rng.randrange(1, 60))]
    prompt = prefix[: rng.choice([0, 20, 50])] + ending
    if rng.random() < 0.25:
        return prompt, BeamSearchParams(3, max_tokens=rng.randrange(2, 45))
    n, salt = rng.choice([1, 1, 1, 3]), rng.choice([None, None, "salt"])
    max_tokens = rng.randrange(20, 45) if n > 1 else rng.randrange(2, 140)
    return prompt, SamplingParams(
        n=n, temperature=0.9, seed=rng.randrange(99), max_tokens=max_tokens, cache_salt=salt
    )
