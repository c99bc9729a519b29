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

FIRST = KERNEL_BACKENDS[0]  # the kernel set with which steps and the engine run
SWEPT = "fa3"  # the kernel set that is timed with several numbers of splits, last
CANARY = "canary"  # the part whose failure turns CUDA graphs off in all parts after it
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

    canary: str
    steps: str
    few_steps: str
    specs: str
    block_sizes: str
    contiguous: str
    engine: str
    few_engine: str
    several_steps: str
    tune: str


_CANARY = "--models tiny --rows 2 --contexts 64 --round 0.01"
REAL = Sizes(
    canary=f"{_CANARY} --backend {FIRST}",
    steps=f"--models 8b --rows 1,64,8,256 --contexts 1024 --chunks 2048 --backend {FIRST} --seconds 150",
    few_steps=f"--models 8b --rows 1 --contexts 1024 --backend {FIRST} --seconds 80",
    specs="llama-3-8b decode 16x2048,llama-3-8b decode 64x2048,llama-3-8b chunk 2048+0",
    block_sizes="decode in blocks of",
    contiguous="",
    engine=f"--model 8b --rows 1,8,64,256 --context 1024 --new 64 --backend {FIRST} --seconds 190",
    few_engine=f"--model 8b --rows 1,64 --context 1024 --new 64 --backend {FIRST} --seconds 110",
    several_steps=f"--model 8b --rows 1,64 --context 1024 --new 64 --backend {FIRST} --steps 8 --seconds 110",
    tune="--minutes 1.8",
)
_TINY_STEPS = "--models tiny --rows 2 --contexts 64 --chunks 32 --round 0.01"
_TINY_ENGINE = "--model tiny --dtype float32 --rows 1,2 --context 64 --new 16 --chunk 128 --trace 8 --seconds 590"
SMALL = Sizes(
    canary=_CANARY,
    steps=_TINY_STEPS,
    few_steps=_TINY_STEPS,
    specs="llama-3-8b decode 16x2048,llama-3-8b chunk 2048+0",
    block_sizes="decode in blocks of 128",
    contiguous="--small",
    engine=_TINY_ENGINE,
    few_engine=_TINY_ENGINE,
    several_steps=f"{_TINY_ENGINE} --steps 8",
    tune="--minutes 0.5 --small --interpret",
)


def groups(check: Check, state: Path) -> Iterator[list[Part]]:
    """Yields groups of parts that run at the same time.

    The first call on a GPU has time for about half of them. So the parts of the first kernel set
    come first: whether its kernels are right, whole steps, the engine, and what its kernels take.

    Args:
        check: Makes the processes.
        state: The directory that outlives a run, for what has been compiled and tuned.
    """
    for group in _groups(check, SMALL if check.interpret else REAL, state):
        yield [dataclasses.replace(part, child=_sharing(part.child, state)) for part in group]


def _groups(check: Check, sizes: Sizes, state: Path) -> Iterator[list[Part]]:
    canary = check.tool(CANARY, "bench_step.py", *sizes.canary.split(), needs_s=20, limit_s=40)
    yield [Part(canary, "a step of a tiny model; if it fails, the rest runs without CUDA graphs")]
    pages = check.part("pages", needs_s=40, limit_s=100)
    shows = "writes and copies of pages against XLA"
    one_order = check.part("one-order", needs_s=40, limit_s=100, seconds=85)
    yield [
        _parity(check, FIRST, limit_s=100),
        Part(pages, shows),
        Part(one_order, "whether `batch_invariant` kernels have the same bits in any company"),
    ]
    steps = check.tool("steps", "bench_step.py", *sizes.steps.split(), needs_s=90, limit_s=170)
    yield from _with_and_without_graphs(
        Part(steps, "whole steps of an 8B shape, and their parts"),
        check.tool(
            "steps without graphs",
            "bench_step.py",
            *sizes.few_steps.split(),
            needs_s=40,
            limit_s=100,
        ),
    )
    file = "lab/bench_engine.py"
    engine = check.tool("engine", file, *sizes.engine.split(), needs_s=120, limit_s=210)
    yield from _with_and_without_graphs(
        Part(engine, "LLM.generate: rows, a prompt, top-p, a trace"),
        check.tool(
            "engine without graphs", file, *sizes.few_engine.split(), needs_s=80, limit_s=130
        ),
    )
    specs = ["--specs", sizes.specs]
    yield [_bench(check, FIRST, "--specs", f"{sizes.specs},{sizes.block_sizes}")]
    matmuls = check.part("products", needs_s=40, limit_s=100, seconds=80, alone=True)
    yield [Part(matmuls, "products of experts and of weights of few bits")]
    several = sizes.several_steps.split()
    yield [
        Part(
            check.tool("engine in several steps", file, *several, needs_s=80, limit_s=130),
            "LLM.generate with up to 8 decode steps in an executable",
        )
    ]
    yield from _later_parts(check, sizes, specs)
    tune = [*sizes.tune.split(), "--tune", "--tuned-directory", str(state / "tuned")]
    tune += ["--backends", FIRST if check.interpret else ",".join(KERNEL_BACKENDS)]
    tune += ["--specs", "llama-3-8b decode 1x2048" if check.interpret else sizes.specs]
    tuner = check.tool("tune", "bench_kernels.py", *tune, needs_s=120, limit_s=140)
    yield [Part(tuner, "faster tiles")]


def _later_parts(check: Check, sizes: Sizes, specs: list[str]) -> Iterator[list[Part]]:
    """Yields the parts of the other kernel sets, of the sampler and of other libraries."""
    contiguous = check.tool(
        "contiguous",
        "lab/time_contiguous_attention.py",
        *specs,
        *sizes.contiguous.split(),
        needs_s=30,
        limit_s=70,
    )
    yield [Part(contiguous, "torch's attention over contiguous keys and values", may_lack=True)]
    sampler = check.part("sampler", needs_s=30, limit_s=80, alone=True)
    yield [Part(sampler, "the selection of top-k and top-p")]
    few_steps = sizes.few_steps.split()
    skipping = check.tool(
        "steps skip-profiled", "bench_step.py", *few_steps, needs_s=40, limit_s=90
    )
    yield [Part(with_flag(skipping, SKIP_PROFILED), "whether updates of graphs cost time")]
    for name in KERNEL_BACKENDS:
        if name != FIRST:
            yield [_parity(check, name, limit_s=60)]
            splits = ["--splits", "1,2,4,8,16"] if name == SWEPT else []
            yield [_bench(check, name, *splits, *specs)]


def _parity(check: Check, name: str, *, limit_s: float) -> Part:
    parity = check.part("parity", name, needs_s=40, limit_s=limit_s)
    return Part(parity, "results against float64", may_lack=name == SWEPT)


def _bench(check: Check, name: str, *arguments: str) -> Part:
    bench = check.part("bench", name, *arguments, needs_s=40, limit_s=90, seconds=75, alone=True)
    return Part(bench, "attention alone, with measured ceilings", may_lack=name == SWEPT)


def _with_and_without_graphs(part: Part, plain: Child) -> Iterator[list[Part]]:
    """Yields a part, and the one that runs if it fails."""
    yield [part]
    shows = "whether CUDA graphs were the reason"
    yield [Part(with_flag(plain, NO_GRAPHS), shows, if_failed=part.name)]


def with_flag(child: Child, flag: str) -> Child:
    """Returns the process with one more flag of XLA."""
    before = child.environment.get("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    flags = f"{before} {flag}".strip()
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
