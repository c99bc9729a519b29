"""Makes workloads, measures them and reports the results; `jaxpage bench` runs this room.

The names are loaded at first use, so that a simulation draws its lengths without jax. Other rooms
and the tools take:

    run_throughput    measures the tokens per second of many requests at once
    run_latency       measures how long one batch takes
    run_serve         measures latencies and throughput of a server as its clients see them
    run_startup       measures the seconds from the start of a process to its first token
    run_roofline      measures how near steps come to what the machine can do
    run_kv_dtype      measures what keys and values of eight bits do to a model
    run_quantization  measures weights of few bits
    run_speculation   measures speculative decoding against none
    measure_shapes    measures the steps of an engine, by their shapes
    SHORT_PROMPT      is the length of the prompts of which it times decode steps
    parameters        gives sampling parameters for an exact number of tokens
    make_workload     makes requests with the lengths of a dataset
    TASKS             names the tasks of speculative decoding that have prompts
    prompts_of_tasks  gives the prompts of tasks as tokens of a model
    environment       describes the machine and the packages of a measurement
    DATASETS          holds the distributions of lengths by name
    Lengths           is an array of lengths in tokens
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpage.bench.kv_dtype import run_kv_dtype
    from jaxpage.bench.latency import run_latency
    from jaxpage.bench.measure import parameters
    from jaxpage.bench.quantization import run_quantization
    from jaxpage.bench.results import environment
    from jaxpage.bench.roofline import run_roofline
    from jaxpage.bench.serve import run_serve
    from jaxpage.bench.shape_times import measure_shapes
    from jaxpage.bench.speculation import run_speculation
    from jaxpage.bench.start_times import run_startup
    from jaxpage.bench.task_prompts import TASKS, prompts_of_tasks
    from jaxpage.bench.throughput import run_throughput
    from jaxpage.bench.workloads import DATASETS, SHORT_PROMPT, Lengths, make_workload

__all__ = [
    "DATASETS",
    "SHORT_PROMPT",
    "TASKS",
    "Lengths",
    "environment",
    "make_workload",
    "measure_shapes",
    "parameters",
    "prompts_of_tasks",
    "run_kv_dtype",
    "run_latency",
    "run_quantization",
    "run_roofline",
    "run_serve",
    "run_speculation",
    "run_startup",
    "run_throughput",
]

_HOMES = {
    "environment": "jaxpage.bench.results",
    "make_workload": "jaxpage.bench.workloads",
    "parameters": "jaxpage.bench.measure",
    "run_kv_dtype": "jaxpage.bench.kv_dtype",
    "run_latency": "jaxpage.bench.latency",
    "run_quantization": "jaxpage.bench.quantization",
    "run_roofline": "jaxpage.bench.roofline",
    "run_serve": "jaxpage.bench.serve",
    "measure_shapes": "jaxpage.bench.shape_times",
    "run_speculation": "jaxpage.bench.speculation",
    "run_startup": "jaxpage.bench.start_times",
    "run_throughput": "jaxpage.bench.throughput",
    "prompts_of_tasks": "jaxpage.bench.task_prompts",
    "TASKS": "jaxpage.bench.task_prompts",
    "DATASETS": "jaxpage.bench.workloads",
    "Lengths": "jaxpage.bench.workloads",
    "SHORT_PROMPT": "jaxpage.bench.workloads",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxpage.bench' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
