"""Engines for tests, kept by their settings so that tests share compiled work, and a look at the
logits that they draw from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpage import LLM, SamplingParams
from jaxpage.assembly.planning import engine_spec
from jaxpage.device.inputs.buckets import BucketMenu, make_menu
from jaxpage.device.inputs.step_inputs import unpack
from jaxpage.device.pages import kv_pages
from jaxpage.device.steps import logits_step
from jaxpage.engine.engine import Engine
from jaxpage.models.base import KVSpec
from jaxpage.outputs import CompletionOutput, RequestOutput
from tests.support.executables import when_used

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
MISTRAL = {
    **LLAMA,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 20,
}

QWEN3_5 = {
    **{
        **LLAMA,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "head_dim": 16,
    },
    **{"num_hidden_layers": 3, "full_attention_interval": 3, "partial_rotary_factor": 0.5},
    **{
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}

GRANITE_4 = {
    **{
        **LLAMA,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layers_block_type": ["mamba", "mamba", "attention"],
    },
    **{"num_hidden_layers": 3, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16},
    **{"num_local_experts": 4, "shared_intermediate_size": 32, "intermediate_size": 32},
    "attention_multiplier": 0.25,
}

LFM2 = {
    **{**LLAMA, "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2"},
    **{"num_hidden_layers": 3, "full_attn_idxs": [2], "conv_L_cache": 4},
}

JAMBA = {
    **{**LLAMA, "architectures": ["JambaForCausalLM"], "model_type": "jamba"},
    **{"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 2, "num_experts": 4},
}

# The geometries of the tests. Engines of a model share what is compiled for one, also those with
# fewer blocks (see `make_llm`) or with 16 tokens, whose shapes are among those of 64. Other numbers
# are shapes of their own: a test needs a reason for them.
PLAIN = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
BLOCKS_OF_16 = {**PLAIN, "block_size": 16, "num_blocks": 129}
BLOCKS_OF_4 = {**PLAIN, "block_size": 4, "num_blocks": 513}
BLOCKS_OF_1 = {**PLAIN, "block_size": 1, "num_blocks": 1025}
WIDE = {**PLAIN, "max_num_seqs": 16, "max_num_batched_tokens": 128}
# one sequence of the longest, or a few until they grow
SMALL_POOL = {"num_blocks": 17, "max_num_batched_tokens": 16}
# Engines that differ in what must not matter to a request; that of the window is for a model that
# has one.
ENGINES = {
    "recompute": SMALL_POOL,
    "swap": {**SMALL_POOL, "preemption_mode": "swap", "enable_prefix_caching": False},
    "fair and mixed": {
        **SMALL_POOL,
        "preemption_mode": "auto",
        "scheduling_policy": "fair",
        "enable_mixed_steps": True,
    },
    "blocks of 4": {**BLOCKS_OF_4, "enable_prefix_caching": False},
    "window": {**SMALL_POOL, "preemption_mode": "swap"},
}

_DEVICE_BLOCKS = {
    each["block_size"]: each["num_blocks"] for each in (BLOCKS_OF_16, BLOCKS_OF_4, BLOCKS_OF_1)
}
_WITH_SCRATCH_BLOCKS = ("draft_model", "eagle", "eagle3", "mtp", "auto")


def make_llm(
    directory: Path | str, *, at_start: bool = False, largest_shapes: bool = False, **settings: Any
) -> LLM:
    """Makes an LLM with a small menu of shapes.

    Engines move blocks to the host only where a test asks for them.

    They compute in float32, whatever the checkpoint is in, unless a test asks for another type.

    at_start: everything is compiled at the start, as for users; otherwise each shape when it is
    first used.
    largest_shapes: steps with few rows run in the shapes of those with many. Where the choice among
    shapes is no subject, this saves a
    second for each that is not compiled.

    A pool that is smaller than its geometry's is small on the host alone: the pages on the device,
    which are in every shape, keep their size. A drafter on the device has scratch blocks right
    behind the pool, so there the pages are as large as was asked.

    Where "auto" steps are asked for by name, they are those of an accelerator, up to 4 at once.
    """
    llm: LLM = make_kind(
        LLM, directory, at_start=at_start, largest_shapes=largest_shapes, **settings
    )
    return llm


def make_kind(
    kind: type[Any],
    directory: Path | str,
    *,
    at_start: bool = False,
    largest_shapes: bool = False,
    **settings: Any,
) -> Any:
    """Returns an `LLM` or an `AsyncLLM` as `make_llm` makes it."""
    settings = {**BLOCKS_OF_16, "dtype": "float32", "preemption_mode": "recompute", **settings}
    with pytest.MonkeyPatch.context() as patch:
        drafting = settings.get("speculative_config") or {}
        drafting = {"method": drafting} if isinstance(drafting, str) else drafting
        method = drafting.get("method") if isinstance(drafting, dict) else drafting.method
        if method not in _WITH_SCRATCH_BLOCKS:
            patch.setattr(engine_spec, "page_shapes", roomy_page_shapes)
        if settings.get("num_scheduler_steps") == "auto":
            patch.setattr(engine_spec, "STEPS_ON_CPU", 4)
        if largest_shapes and engine_spec.make_menu is make_menu:  # no fixture has replaced it
            patch.setattr(engine_spec, "make_menu", make_short_menu)
        with contextlib.nullcontext() if at_start else when_used():
            return kind(model=str(directory), use_tqdm=False, **settings)


def make_short_menu(*sizes: Any, **kinds: Any) -> BucketMenu:
    """Returns the menu with the most rows of each kind of step alone: one shape for each number of
    tokens of a row.
    """
    menu = make_menu(*sizes, **kinds)
    verify = {bucket.num_tokens // bucket.num_rows: bucket for bucket in menu.verify}
    return dataclasses.replace(
        menu,
        decode=menu.decode[-1:],
        chunk=menu.chunk[-1:],
        verify=tuple(sorted(verify.values())),
        multi_step=menu.multi_step[-1:],
        vectors=menu.vectors[-1:],
    )


def make_menu_of_chunks(*sizes: Any, **kinds: Any) -> BucketMenu:
    """Returns the short menu with the shape of chunks in place of that of decode steps."""
    menu = make_short_menu(*sizes, **kinds)
    return dataclasses.replace(menu, decode=menu.chunk)


@contextlib.contextmanager
def decoding_in_chunks() -> Iterator[None]:
    """Runs what decodes in the shape of chunks, so that a new engine compiles one step, not two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_spec, "make_menu", make_menu_of_chunks)
        yield


def roomy_page_shapes(
    kv: KVSpec, num_blocks: list[int], block_size: int, dtype: Any, **layout: bool
) -> kv_pages.KVPages:
    """Returns `kv_pages.page_shapes`, but for pages with more blocks than the host hands out."""
    minimum = _DEVICE_BLOCKS.get(block_size, 0) if len(set(num_blocks)) == 1 else 0
    roomy = [max(count, minimum) for count in num_blocks]
    return kv_pages.page_shapes(kv, roomy, block_size, dtype, **layout)


@contextlib.contextmanager
def engines_by_name(
    settings: Mapping[str, dict[str, Any]], directory_of: Callable[[str], Path | str]
) -> Iterator[Callable[[str], LLM]]:
    """Returns engines that are made when they are first asked for."""
    made: dict[str, LLM] = {}

    def engine(name: str) -> LLM:
        if name not in made:
            made[name] = make_llm(directory_of(name), **settings[name])
        return made[name]

    yield engine
    for llm in made.values():
        llm.shutdown()


def tokens_of(outputs: list[RequestOutput]) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Returns of the first sequence of each the tokens and log probabilities, which must agree in
    all bits.
    """
    return [
        (
            output.outputs[0].token_ids,
            [
                {t: e.logprob for t, e in entry.items()}
                for entry in output.outputs[0].logprobs or []
            ],
        )
        for output in outputs
    ]


def free_blocks(llm: LLM) -> int:
    return llm.stats()["num_blocks_free"]


def invariants(llm: LLM) -> None:
    """Asserts what must hold of an engine that is idle."""
    stats = llm.stats()  # between two steps, and after all that callers have ended by now
    llm._engine.scheduler.check()
    assert stats["num_blocks_free"] == stats["num_blocks_total"]
    assert stats["num_requests_running"] == stats["num_requests_waiting"] == 0
    assert (
        not llm._engine._strategies and not llm._engine._groups and not llm._engine.metrics.requests
    )
    assert not llm._driver.turns.live


@contextlib.contextmanager
def steps_by_hand(llm: LLM) -> Iterator[None]:
    """Makes the engine's thread wait, while a call takes the steps that it waits for.

    A stream that nobody reads stands still.
    """
    driver, waits, may_go_on = llm._driver, threading.Event(), threading.Event()
    parked = driver.call(lambda engine: (waits.set(), may_go_on.wait()))
    waits.wait()
    driver.is_by_hand = True
    try:
        yield
    finally:
        driver.is_by_hand = False
        may_go_on.set()
        driver.wait(parked)


def run_giving_way(engine: Engine, step: int) -> None:
    """Steps an engine until nothing is left; before step `step`, counted from 0, the newest running
    group is preempted.
    """
    for number in itertools.count():
        if not engine.has_unfinished:
            return
        if number == step:
            engine.scheduler.give_way()
        engine.step()
        engine.scheduler.check()


def lone_sample(
    llm: LLM, prompt: list[int], params: SamplingParams, sample_index: int
) -> CompletionOutput:
    """Returns what a request of its own draws with the noise of this sample."""
    engine = llm._engine
    reporter = engine.add(
        "lone", engine.prepare(None, prompt, dataclasses.replace(params, n=1, best_of=None))
    )
    (group,) = engine.scheduler.waiting
    group.sequences[0].sample_index = sample_index
    while engine.has_unfinished:
        engine.step()
    (output,) = reporter.whole().outputs
    return output


class LogitsWitness:
    """Stands in front of an engine's executables and keeps the logits of every draw, computed by
    the same step function.

    `logits[sequence_id, position]` is what the token at that position was drawn from. Sequence ids
    count up from 0.
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
        def run(
            parameters: Any, pages: Any, packed: Any, processor_inputs: Any, *vectors: Any
        ) -> Any:
            if bucket not in self._jitted:
                self._jitted[bucket] = jax.jit(functools.partial(self._logits_of, bucket))
            logits = np.asarray(self._jitted[bucket](parameters, pages, packed, *vectors))
            for sample, row in zip(self._samples, logits, strict=False):
                self.logits[sample.sequence_id, sample.position] = row
            step = self._real.step(bucket, draft_depth)
            return step(parameters, pages, packed, processor_inputs, *vectors)

        return run

    def _built(self, plan: Any, *masks: Any) -> Any:
        self._samples = plan.samples
        return self._build(plan, *masks)

    def _logits_of(
        self, bucket: Any, parameters: Any, pages: Any, packed: Any, *vectors: Any
    ) -> jax.Array:
        options = self._real.options
        inputs = unpack(packed, bucket, options.tables)
        return logits_step(parameters, pages, inputs, *vectors, bucket=bucket, options=options)[0]
