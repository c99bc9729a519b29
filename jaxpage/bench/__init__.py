"""Makes workloads, measures them and reports the results; `jaxpage bench` runs this room.

The names are loaded at first use, so that a simulation draws its lengths without jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.bench.latency import run_latency  # measures how long one batch takes
    from jaxpage.bench.measure import (
        parameters,  # gives sampling parameters for an exact number of tokens
    )
    from jaxpage.bench.results import (
        environment,  # describes the machine and the packages of a measurement
    )
    from jaxpage.bench.serving.serve import (
        run_serve,  # measures latencies and throughput of a server as its clients see them
    )
    from jaxpage.bench.studies.kv_dtype import (
        run_kv_dtype,  # measures what keys and values of eight bits do to a model
    )
    from jaxpage.bench.studies.quantization import run_quantization  # measures weights of few bits
    from jaxpage.bench.studies.roofline import (
        run_roofline,  # measures how near steps come to what the machine can do
    )
    from jaxpage.bench.studies.shape_times import (
        measure_shapes,  # measures the steps of an engine, by their shapes
    )
    from jaxpage.bench.studies.speculation import (
        run_speculation,  # measures speculative decoding against none
    )
    from jaxpage.bench.studies.start_times import (
        run_startup,  # measures the seconds from the start of a process to its first token
    )
    from jaxpage.bench.studies.task_prompts import (
        TASKS,  # names the tasks of speculative decoding that have prompts
        prompts_of_tasks,  # gives the prompts of tasks as tokens of a model
    )
    from jaxpage.bench.throughput import (
        run_throughput,  # measures the tokens per second of many requests at once
    )
    from jaxpage.bench.workloads import (
        DATASETS,  # holds the distributions of lengths by name
        SHORT_PROMPT,  # is the length of the prompts of which it times decode steps
        Lengths,  # is an array of lengths in tokens
        make_workload,  # makes requests with the lengths of a dataset
    )

__getattr__, __dir__ = open_door(__name__)
