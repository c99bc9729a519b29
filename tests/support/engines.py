"""Engines for tests, kept by their settings so that tests share compiled work, and a look at the logits that they draw from."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpage import LLM, SamplingParams
from jaxpage.device.step_inputs import unpack
from jaxpage.device.steps import logits_step
from jaxpage.engine.engine import Engine
from jaxpage.outputs import CompletionOutput
from jaxpage.scheduling import Scheduler
from jaxpage.scheduling import scheduler as planning
from jaxpage.scheduling.open_plan import OpenPlan

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
}


def make_llm(directory: Path, **settings: Any) -> LLM:
    """An LLM with a small menu of shapes; those that move blocks to the host only where a test asks for them."""
    small: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 129, "max_model_len": 256}
    small["preemption_mode"] = "recompute"
    return LLM(model=str(directory), use_tqdm=False, **{**small, **settings})


def free_blocks(llm: LLM) -> int:
    return llm.stats()["num_blocks_free"]


def invariants(llm: LLM) -> None:
    """What must hold of an engine that is idle."""
    llm._engine.scheduler.check()
    stats = llm.stats()
    assert stats["num_blocks_free"] == stats["num_blocks_total"]
    assert stats["num_requests_running"] == stats["num_requests_waiting"] == 0
    assert not llm._engine._strategies and not llm._engine._groups and not llm._engine.metrics.requests
    assert not llm._calls._changed


def give_way(scheduler: Scheduler) -> None:
    """Makes the newest running group give way at the beginning of the next step, whatever there is room for."""

    class Forced(OpenPlan):
        def __init__(self) -> None:
            super().__init__()
            planning.OpenPlan = OpenPlan  # type: ignore[misc]
            if scheduler.num_running > 1:
                scheduler._preempt_last(self)

    planning.OpenPlan = Forced  # type: ignore[misc]


def run_giving_way(engine: Engine, step: int) -> None:
    """Steps an engine until nothing is left; before step `step`, counted from 0, the newest running group gives way."""
    for number in itertools.count():
        if not engine.has_unfinished:
            return
        if number == step:
            give_way(engine.scheduler)
        engine.step()
        engine.scheduler.check()


def lone_sample(llm: LLM, prompt: list[int], params: SamplingParams, sample_index: int) -> CompletionOutput:
    """What a request of its own draws with the noise of this sample."""
    engine = llm._engine
    reporter = engine.add("lone", engine.prepare(None, prompt, dataclasses.replace(params, n=1, best_of=None)))
    (group,) = engine.scheduler.waiting
    group.sequences[0].sample_index = sample_index
    while engine.has_unfinished:
        engine.step()
    (output,) = reporter.whole().outputs
    return output


class LogitsWitness:
    """Stands in front of an engine's executables and keeps the logits of every draw, computed by the same step function.

    `logits[sequence_id, position]` is what the token at that position was drawn from. Sequence ids count up from 0.
    """

    def __init__(self, llm: LLM):
        self.logits: dict[tuple[int, int], np.ndarray] = {}
        self._engine = llm._engine
        self._real = llm._engine.runner.executables
        self._build = llm._engine.builder.build
        self._jitted: dict[Any, Any] = {}
        self._engine.runner.executables = self  # type: ignore[assignment]
        self._engine.builder.build = self._built  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def step(self, bucket: Any, draft_depth: int | None = None) -> Any:
        def run(parameters: Any, pages: Any, packed: Any, adjustments: Any) -> Any:
            if bucket not in self._jitted:
                self._jitted[bucket] = jax.jit(functools.partial(self._logits_of, bucket))
            logits = np.asarray(self._jitted[bucket](parameters, pages, packed))
            for sample, row in zip(self._samples, logits, strict=False):
                self.logits[sample.sequence_id, sample.position] = row
            return self._real.step(bucket, draft_depth)(parameters, pages, packed, adjustments)

        return run

    def _built(self, plan: Any, *masks: Any) -> Any:
        self._samples = plan.samples
        return self._build(plan, *masks)

    def _logits_of(self, bucket: Any, parameters: Any, pages: Any, packed: Any) -> jax.Array:
        options = self._real.options
        inputs = unpack(packed, bucket, options.tables)
        return logits_step(parameters, pages, inputs, bucket=bucket, options=options)[0]
