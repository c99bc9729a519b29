"""Engines that draft without weights and must write what one without drafts writes, with room and with too little of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxpage import LLM
from tests.support.engines import make_llm

Settings = dict[str, dict[str, Any]]

# Menus are small, since compiling takes longer than all else.
ROOM = {"max_num_batched_tokens": 32}
SMALL_POOL = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 80, "enable_prefix_caching": False}


def engines_that_draft(drafting: dict[str, Any], **roomy: dict[str, Any]) -> Settings:
    """By name. roomy: what those with room draft."""
    return {
        "without": ROOM,
        **{name: {**ROOM, "speculative_config": drafts} for name, drafts in roomy.items()},
        "recomputing": {**SMALL_POOL, "block_size": 1, "num_blocks": 81, "speculative_config": drafting},
        "swapping": {
            **SMALL_POOL,
            **{"block_size": 4, "num_blocks": 21, "preemption_mode": "swap", "speculative_config": drafting},
        },
    }


def held(settings: Settings, num_requests: int) -> dict[str, list[int]]:
    """Which requests of test_speculation.py an engine has room for: two need more, or more samples, than the small pools."""
    return {name: sorted({*range(num_requests)} - ({12, 14} if "ing" in name else set())) for name in settings}


@contextmanager
def made_when_asked(directory: Path, settings: Settings) -> Iterator[Callable[[str], LLM]]:
    """The engine of a name; each is made when first asked for."""
    made: dict[str, LLM] = {}

    def engine(name: str) -> LLM:
        if name not in made:
            made[name] = make_llm(directory, **settings[name])
        return made[name]

    try:
        yield engine
    finally:
        for llm in made.values():
            llm.shutdown()


def right_drafts(llm: LLM) -> int:
    accepted: int = llm.stats()["spec_decode_num_accepted_tokens_total"]
    return accepted
