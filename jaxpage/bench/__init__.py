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

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.bench.latency import run_latency
    from jaxpage.bench.measure import parameters
    from jaxpage.bench.results import environment
    from jaxpage.bench.serving.serve import run_serve
    from jaxpage.bench.studies.kv_dtype import run_kv_dtype
    from jaxpage.bench.studies.quantization import run_quantization
    from jaxpage.bench.studies.roofline import run_roofline
    from jaxpage.bench.studies.shape_times import measure_shapes
    from jaxpage.bench.studies.speculation import run_speculation
    from jaxpage.bench.studies.start_times import run_startup
    from jaxpage.bench.studies.task_prompts import TASKS, prompts_of_tasks
    from jaxpage.bench.throughput import run_throughput
    from jaxpage.bench.workloads import DATASETS, SHORT_PROMPT, Lengths, make_workload

__getattr__, __dir__ = open_door(__name__)
