"""Lists the parts of tools/gpu_slot.py in order, each with its process, its needs and its limit."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pallas_kernels.sets import KERNEL_BACKENDS
from tools.lab.kernel_lab.check import Check
from tools.lab.kernel_lab.children import Child

PRODUCTS_AND_SAMPLER = ("products", "sampler")  # names of parts in tools.lab.kernel_lab
SWEPT = "fa3"  # the kernel set that is timed with several numbers of splits, last
NO_GRAPHS = "--xla_gpu_enable_command_buffer="
SKIP_PROFILED = "--xla_gpu_command_buffer_update_mode=SKIP_PROFILED"


@dataclass(frozen=True)
class Part:
    """One part of the run.

    Attributes:
        child: The part's process.
        shows: The purpose of the part.
        if_failed: The part that must have failed, or else there is nothing to find out.
        may_lack: True if a rehearsal may leave the part out, because it needs what a CPU or its
            environment does not have.
    """

    child: Child
    shows: str
    if_failed: str = ""
    may_lack: bool = False

    @property
    def name(self) -> str:
        """Returns the part's name."""
        return self.child.name


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Holds arguments of the programs, for the real run or for a miniature on a CPU."""

    steps: str
    few_steps: str
    specs: str
    contiguous: str
    engine: str
    few_engine: str
    tune: str


REAL = Sizes(
    steps="--models 8b --rows 2,64,8,256 --contexts 1024 --chunks 2048 --seconds 150",
    few_steps="--models 8b --rows 2 --contexts 1024 --seconds 80",
    specs="llama-3-8b decode 16x2048,llama-3-8b decode 64x2048,llama-3-8b chunk 2048+0",
    contiguous="",
    engine="--model 8b --rows 1,8,64,256 --context 1024 --new 64 --seconds 210",
    few_engine="--model 8b --rows 1,64 --context 1024 --new 64 --seconds 110",
    tune="--minutes 1.8",
)
_TINY_STEPS = "--models tiny --rows 2 --contexts 64 --chunks 32 --round 0.01"
_TINY_ENGINE = "--model tiny --dtype float32 --rows 1,2 --context 64 --new 16 --chunk 128 --trace 8 --seconds 590"
SMALL = Sizes(
    steps=_TINY_STEPS,
    few_steps=_TINY_STEPS,
    specs="llama-3-8b decode 16x2048,llama-3-8b chunk 2048+0",
    contiguous="--small",
    engine=_TINY_ENGINE,
    few_engine=_TINY_ENGINE,
    tune="--minutes 0.5 --small --interpret",
)


def groups(check: Check, state: Path) -> Iterator[list[Part]]:
    """Yields groups of parts that run at the same time.

    Correctness of the kernels comes first; then whole steps, kernels, the engine, and the tuner.

    Args:
        check: Makes the processes.
        state: The directory that outlives a run, for what has been compiled and tuned.
    """
    for group in _groups(check, SMALL if check.interpret else REAL, state):
        yield [dataclasses.replace(part, child=_sharing(part.child, state)) for part in group]


def _groups(check: Check, sizes: Sizes, state: Path) -> Iterator[list[Part]]:
    shows = "results against float64"
    right = [
        Part(check.part("parity", name, needs_s=45, limit_s=170), shows, may_lack=name == SWEPT)
        for name in KERNEL_BACKENDS
    ]
    yield [
        *right,
        Part(
            check.part("pages", needs_s=40, limit_s=150), "writes and copies of pages against XLA"
        ),
    ]
    for name in PRODUCTS_AND_SAMPLER:
        yield [
            Part(
                check.part(name, needs_s=40, limit_s=100, seconds=80, alone=True),
                f"GPU check: {name}",
            )
        ]
    yield from _whole_steps(check, sizes)
    contiguous = ["--specs", sizes.specs, *sizes.contiguous.split()]
    tool = check.tool(
        "contiguous", "lab/time_contiguous_attention.py", *contiguous, needs_s=30, limit_s=70
    )
    yield [Part(tool, "torch's attention over contiguous keys and values", may_lack=True)]
    specs = ["--specs", sizes.specs]
    for name in KERNEL_BACKENDS:
        if name != SWEPT:
            timed = check.part(
                "bench", name, *specs, needs_s=40, limit_s=110, seconds=95, alone=True
            )
            yield [Part(timed, "attention alone, with measured ceilings")]
    yield from _engine(check, sizes)
    swept = ["--splits", "1,2,4,8,16", *specs]
    timed = check.part("bench", SWEPT, *swept, needs_s=40, limit_s=80, seconds=65, alone=True)
    yield [Part(timed, "the same by FlashAttention-3, by number of splits", may_lack=True)]
    tune = [
        *sizes.tune.split(),
        "--tune",
        "--tuned-directory",
        str(state / "tuned"),
        "--backends",
        "triton" if check.interpret else "triton,fa3,mosaic",
    ]
    tune += ["--specs", "llama-3-8b decode 1x2048" if check.interpret else sizes.specs]
    yield [
        Part(
            check.tool("tune", "bench_kernels.py", *tune, needs_s=120, limit_s=140), "faster tiles"
        )
    ]


def _whole_steps(check: Check, sizes: Sizes) -> Iterator[list[Part]]:
    few = sizes.few_steps.split()
    steps = check.tool("steps", "bench_step.py", *sizes.steps.split(), needs_s=90, limit_s=180)
    yield [Part(steps, "whole steps of an 8B shape, and their parts")]
    plain = check.tool("steps without graphs", "bench_step.py", *few, needs_s=40, limit_s=100)
    yield [
        Part(_with_flag(plain, NO_GRAPHS), "whether CUDA graphs were the reason", if_failed="steps")
    ]
    skipping = check.tool("steps skip-profiled", "bench_step.py", *few, needs_s=40, limit_s=90)
    yield [Part(_with_flag(skipping, SKIP_PROFILED), "whether updates of graphs cost time")]


def _engine(check: Check, sizes: Sizes) -> Iterator[list[Part]]:
    engine = check.tool(
        "engine", "lab/bench_engine.py", *sizes.engine.split(), needs_s=150, limit_s=250
    )
    yield [Part(engine, "LLM.generate: rows, a prompt, top-p, a trace")]
    plain = check.tool(
        "engine without graphs",
        "lab/bench_engine.py",
        *sizes.few_engine.split(),
        needs_s=80,
        limit_s=130,
    )
    yield [
        Part(
            _with_flag(plain, NO_GRAPHS), "whether CUDA graphs were the reason", if_failed="engine"
        )
    ]


def _with_flag(child: Child, flag: str) -> Child:
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    return dataclasses.replace(child, environment={**child.environment, "XLA_FLAGS": flags})


def _sharing(child: Child, state: Path) -> Child:
    """Returns the process with the shared compilation cache.

    A process that runs alone also gets nearly all of the memory.
    """
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(state / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    memory = {"XLA_CLIENT_MEM_FRACTION": "0.92"} if child.alone else {}
    return dataclasses.replace(child, environment={**child.environment, **cache, **memory})
