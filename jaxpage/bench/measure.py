"""Runs a workload through jaxpage and times it, apart from start-up, compilation and warm-up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxpage.bench.results import Measurement
from jaxpage.bench.workloads import WorkItem
from jaxpage.llm import LLM
from jaxpage.settings.sampling_params import SamplingParams


def parameters(num_output_tokens: int) -> SamplingParams:
    """Returns parameters for greedy decoding of exactly that many tokens.

    So every engine does the same work.
    """
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_output_tokens)


def warm_up(llm: LLM, workload: Sequence[WorkItem]) -> float:
    """Returns the seconds of a few short generations, which take a step of each shape.

    The first step of a shape is slower. About half of the sequences end in each step, so that steps
    of many rows and of few rows occur.
    """
    start = time.perf_counter()
    items = workload[: llm.config.max_num_seqs]
    prompts = [list(item.prompt_token_ids) for item in items]
    lengths = [
        min(item.num_output_tokens, 1 + (len(items) // index).bit_length())
        for index, item in enumerate(items, 1)
    ]
    llm.generate(prompts, [parameters(length) for length in lengths], use_tqdm=False)
    return time.perf_counter() - start


def run_workload(
    llm: LLM,
    workload: Sequence[WorkItem],
    *,
    load_seconds: float,
    name: str = "jaxpage",
    repeats: int = 1,
) -> Measurement:
    """Runs all requests at once until the last has finished; returns the median of the repeats.

    Args:
        llm: The engine.
        workload: The requests.
        load_seconds: The time that making `llm` took, compilation included.
        name: The name of the engine in the table.
        repeats: The number of runs; of an even number, the slower of the middle ones is the median.
    """
    warmup_seconds = warm_up(llm, workload)
    return median([_run(llm, workload, load_seconds, warmup_seconds, name) for _ in range(repeats)])


def median(runs: Sequence[Measurement]) -> Measurement:
    """Returns the run of the median duration, with the durations of all."""
    middle = sorted(runs, key=lambda run: run.duration)[len(runs) // 2]
    return replace(middle, durations=tuple(run.duration for run in runs))


def _run(
    llm: LLM, workload: Sequence[WorkItem], load_seconds: float, warmup_seconds: float, name: str
) -> Measurement:
    llm.reset_prefix_cache()  # an earlier run has computed these prompts
    llm.memory_report(reset=True)
    before = llm.stats()
    start = time.perf_counter()
    outputs = llm.generate(
        [list(item.prompt_token_ids) for item in workload],
        [parameters(item.num_output_tokens) for item in workload],
    )
    duration = time.perf_counter() - start
    after = llm.stats()
    num_cached = after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"]
    return Measurement.of(
        name,
        workload,
        [output.outputs[0].token_ids for output in outputs],
        duration=duration,
        load_seconds=load_seconds - before["compile_seconds_total"],
        compile_seconds=before["compile_seconds_total"],
        warmup_seconds=warmup_seconds,
        memory=llm.memory_report(),
        details={
            "num_preemptions": sum(after["num_preemptions_total"].values())
            - sum(before["num_preemptions_total"].values()),
            "num_cached_tokens": num_cached,
            "prefix_cache_hit_rate": num_cached
            / sum(len(item.prompt_token_ids) for item in workload),
            "num_steps": after["engine_steps_total"] - before["engine_steps_total"],
            **_of_decoding(before, after),
            **dtypes(llm),
            "compiles_during_run": after["compile_total"] - before["compile_total"],
            "num_blocks": after["num_blocks_total"],
            "num_blocks_free_afterwards": after["num_blocks_free"],
        },
    )


def dtypes(llm: LLM) -> dict[str, str]:
    """Returns the types that "auto" became: that of the computation and that of the KV cache."""
    layout = llm.spec.layout
    cache = layout.dtype if layout.kv_cache_dtype == "auto" else layout.kv_cache_dtype
    return {"effective_dtype": layout.dtype, "effective_kv_cache_dtype": cache}


def _of_decoding(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Returns the tokens for each sequence of each decode step, and the numbers of drafts."""
    names = ("decode_tokens_total", "decode_rows_total")
    num_tokens, num_rows = (after[name] - before[name] for name in names)
    drafted, accepted = (
        after[name] - before[name]
        for name in ("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")
    )
    return {
        "tokens_per_target_step": num_tokens / num_rows if num_rows else 0.0,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
    }
