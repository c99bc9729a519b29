"""Times the whole engine on random weights: prompts, decode at several sizes, and a trace.

    python tools/lab/bench_engine.py --model 8b --rows 1,8,64,256 --to engine.jsonl

The time of a decode step is what `LLM.generate` takes for more new tokens, prompts and all else
being equal, so it includes neither prompts nor start-up. Weights are drawn on the device; no file
is read. Each result is appended to --to at once, as a line of JSON. tools/gpu_slot.py runs it.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

# Lets the program run where jaxpage is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.lab.kernel_lab.findings import (
    FAILED,
    LEFT_OUT,
    PASSED,
    Finding,
    LeftOut,
    append,
    first_line,
    judge,
)

try:
    from jaxpage import LLM, SamplingParams
    from jaxpage.bench import make_workload, parameters
    from tools.lab.step_times import BLOCK_SIZE, MODELS, random_model

    MISSING = ""
except ImportError as absent:
    MISSING = absent.name or str(absent)

FEW = 2  # new tokens of the shorter of two runs
ROUNDS = 5  # rounds of a prompt
FEW_ROWS = 64  # larger numbers of rows are timed last
ROW_S = 0.15  # the time that a row may need, most of it for three times its prompt


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="8b", help="8b, 1b or tiny; default: 8b")
    parser.add_argument(
        "--rows", default="1,8,64,256", help="sequences that decode; default: 1,8,64,256"
    )
    parser.add_argument(
        "--context", type=int, default=1024, help="tokens of each prompt; default: 1024"
    )
    parser.add_argument(
        "--new", type=int, default=64, help="new tokens of the longer of two runs; default: 64"
    )
    parser.add_argument(
        "--chunk", type=int, default=2048, help="tokens of the prompt that is timed; default: 2048"
    )
    parser.add_argument(
        "--trace", type=int, default=256, help="requests of the trace; default: 256"
    )
    parser.add_argument("--backend", default="auto", help="kernel set; default: auto")
    parser.add_argument(
        "--steps", type=int, default=1, help="decode steps in an executable; default: 1"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--seconds", type=float, default=240, help="nothing is begun that may not fit; default: 240"
    )
    parser.add_argument(
        "--to",
        type=Path,
        required=True,
        help="file to which findings are appended as lines of JSON",
    )
    return parser.parse_args(argv)


def peak_bytes() -> int | None:
    """Returns the most memory of the device that was in use, where the device says so."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


@dataclass
class Bench:
    """Times an engine.

    Attributes:
        arguments: The arguments of the command line.
        llm: The engine.
        random: Draws the prompts.
    """

    arguments: argparse.Namespace
    llm: LLM
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    @property
    def vocab_size(self) -> int:
        """Returns the number of tokens of the model's vocabulary."""
        size: int = MODELS[self.arguments.model]["vocab_size"]
        return size

    @property
    def num_slots(self) -> int:
        """Returns how many tokens the KV pool holds."""
        slots: int = self.llm.memory.num_slots
        return slots

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Returns random prompts of one length."""
        return [self.random.integers(5, self.vocab_size, length).tolist() for _ in range(count)]

    def seconds(self, prompts: list[list[int]], new: int, **sampling: Any) -> float:
        """Returns the time of generating this many tokens for each prompt."""
        params = SamplingParams(max_tokens=new, ignore_eos=True, **{"temperature": 0.0, **sampling})
        began = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    def decode(self, rows: int, **sampling: Any) -> Finding:
        """Times a decode step of this many rows.

        Raises:
            LeftOut: The KV pool does not hold them all.
        """
        length = self.arguments.context + self.arguments.new
        num_fitting = self.num_slots // (-(-length // BLOCK_SIZE) * BLOCK_SIZE)
        if rows > num_fitting:
            raise LeftOut(f"the KV pool holds {num_fitting} sequences of {length} tokens")
        prompts, more = self.prompts(rows, self.arguments.context), self.arguments.new - FEW
        self.seconds(prompts, FEW, **sampling)  # the first step of a shape is slower
        short = self.seconds(prompts, FEW, **sampling)
        step = (self.seconds(prompts, self.arguments.new, **sampling) - short) / more
        data = {
            "rows": rows,
            "context": self.arguments.context,
            "step": step,
            "prompts": short,
            **sampling,
        }
        text = f"{1e3 * step:.2f} ms a step, {rows / step:.0f} tokens/s; its prompts took {short:.2f} s"
        return Finding("", PASSED, text, data=data)

    def prompt(self) -> Finding:
        """Times a prompt of `--chunk` tokens."""
        length = self.arguments.chunk
        taken = statistics.median(
            [self.seconds(self.prompts(1, length), 1) for _ in range(1 + ROUNDS)][1:]
        )
        text = f"{1e3 * taken:.1f} ms, {length / taken:.0f} tokens/s"
        return Finding("", PASSED, text, data={"tokens": length, "seconds": taken})

    def trace(self) -> Finding:
        """Times a trace of requests that all come at once."""
        max_length, count = min(512, self.arguments.context), self.arguments.trace
        limits = {"vocab_size": self.vocab_size, "max_input": max_length, "max_output": max_length}
        work = make_workload("sharegpt", count, seed=0, **limits)
        params = [parameters(item.num_output_tokens) for item in work]
        began = time.perf_counter()
        self.llm.generate([list(item.prompt_token_ids) for item in work], params, use_tqdm=False)
        taken = time.perf_counter() - began
        read = sum(len(item.prompt_token_ids) for item in work)
        made = sum(item.num_output_tokens for item in work)
        text = (
            f"{taken:.1f} s, {made / taken:.0f} new tokens/s ({read} tokens of prompts, {made} new)"
        )
        data = {"requests": count, "seconds": taken, "input_tokens": read, "output_tokens": made}
        data |= {
            "preemptions": sum(self.llm.stats()["num_preemptions_total"].values()),
            "memory": peak_bytes(),
        }
        return Finding("", PASSED, text, data=data)


@dataclass
class Results:
    """Appends findings, and begins nothing that may not fit into the remaining time."""

    to: Path
    end: float
    prefix: str = "engine"
    failed: bool = False

    def add(self, check: str, run: Callable[[], Finding], *, needs_s: float = 0.0) -> None:
        """Appends the finding of a run, or the reason why it was left out."""
        left = self.end - time.monotonic()
        if left < needs_s:
            finding = Finding(
                "", LEFT_OUT, f"{max(0, left):.0f} s were left, and it may need {needs_s:.0f}"
            )
        else:
            finding = judge("", run)
        finding.check = f"{self.prefix} {check}"
        self.failed |= finding.status == FAILED
        append(self.to, finding)
        print(f"{finding.check}: {finding.status}: {finding.summary}", flush=True)


def open_engine(arguments: argparse.Namespace, rows: list[int]) -> LLM:
    """Opens an engine with random weights, and as many blocks as fit beside them."""
    config = dict(MODELS[arguments.model])
    return LLM.from_parameters(
        config,
        random_model(config, arguments.dtype),
        may_alias=True,
        max_num_seqs=max(rows),
        max_num_batched_tokens=min(arguments.chunk, 2048),
        max_model_len=max(arguments.context + arguments.new, arguments.chunk + 8, 1024),
        block_size=BLOCK_SIZE,
        dtype=arguments.dtype,
        attention_backend=arguments.backend,
        enable_prefix_caching=False,
        swap_space_blocks=0,
        num_scheduler_steps=arguments.steps,
    )


def start_engine(bench: Bench) -> Finding:
    """Measures how long compiling and the first tokens take."""
    began = time.monotonic()
    bench.seconds(bench.prompts(1, 32), 4)
    first, compiling = time.monotonic() - began, bench.llm.stats()["compile_seconds_total"]
    text = f"{compiling:.0f} s of compiling; the first tokens took {first:.1f} s"
    return Finding("", PASSED, text, data={"compile_seconds": compiling, "first": first})


def measure(arguments: argparse.Namespace, results: Results) -> None:
    """Starts an engine and times what fits."""
    rows = [int(number) for number in arguments.rows.split(",")]
    with open_engine(arguments, rows) as llm:
        bench = Bench(arguments, llm)
        results.add(f"start {arguments.model}", lambda: start_engine(bench))
        few = [count for count in rows if count <= FEW_ROWS]
        decode(bench, results, few)
        results.add(f"prompt of {arguments.chunk} tokens", bench.prompt, needs_s=10)
        count = max(few, default=min(rows))
        sampled = functools.partial(bench.decode, count, temperature=1.0, top_p=0.95)
        results.add(f"decode {count} rows, top-p", sampled, needs_s=15)
        results.add(f"trace of {arguments.trace} requests", bench.trace, needs_s=40)
        # The prompts of many rows take long, so these come last.
        decode(bench, results, [count for count in rows if count not in few])


def decode(bench: Bench, results: Results, rows: list[int]) -> None:
    """Times a decode step for each number of rows."""
    for count in rows:
        run = functools.partial(bench.decode, count)
        results.add(f"decode {count} rows", run, needs_s=ROW_S * count)


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns the exit status."""
    arguments = parse(argv)
    if MISSING:
        append(arguments.to, Finding("engine", LEFT_OUT, f"no {MISSING} here"))
        return 0
    prefix = "engine" if arguments.steps == 1 else "engine in several steps"
    results = Results(arguments.to, time.monotonic() + arguments.seconds, prefix)
    try:
        measure(arguments, results)
    except Exception as error:  # the engine does not start
        append(
            arguments.to,
            Finding(
                "engine", FAILED, first_line(error), data={"traceback": traceback.format_exc()}
            ),
        )
        return 1
    return int(results.failed)


if __name__ == "__main__":
    sys.exit(main())
