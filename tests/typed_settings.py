"""Says what a type checker says of settings, for `mypy`, which is strict: an error that it no
longer finds is one, too. Never run.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxpage import LLM, AsyncLLM, SamplingParams


def settings_are_seen() -> None:
    LLM(
        "demo",
        dtype=jnp.bfloat16,
        max_num_seqs=3,
        kv_cache_memory_bytes="1GiB",
        speculative_config={"method": "ngram"},
    )
    LLM("demo", max_num_seq=3)  # type: ignore[call-arg]
    LLM("demo", max_num_seqs="3")  # type: ignore[arg-type]
    LLM("demo", scheduling_policy="fifo")  # type: ignore[arg-type]
    LLM.from_config("engine.yaml", max_num_seq=3)  # type: ignore[call-arg]
    LLM.from_parameters({}, {}, max_num_seq=3)  # type: ignore[call-arg]
    AsyncLLM("demo", max_num_seq=3)  # type: ignore[call-arg]


def parameters_are_seen() -> tuple[str, ...]:
    params = SamplingParams(stop="end", logit_bias={3: 1.0}, stop_token_ids=range(3))
    SamplingParams(stop=3)  # type: ignore[arg-type]
    SamplingParams(min_q=0.5)  # type: ignore[call-arg]
    return params.stop
