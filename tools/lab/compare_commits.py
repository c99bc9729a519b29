"""Compares how long `LLM` takes in two checkouts, in pairs of runs that follow each other.

    git worktree add ../before COMMIT
    python tools/lab/compare_commits.py ../before . --pairs 30

Each checkout has a process of its own with an engine that stays. In a pair both run the same work
one after the other, and they take turns at being the first. The table has the median time of each,
and the median of the ratios of the pairs, with their quartiles. Measure on a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

WORKER = """
import json, sys, time
from jaxpage import LLM, SamplingParams
settings, num_tokens = json.loads(sys.argv[1]), int(sys.argv[2])
llm = LLM(**settings, use_tqdm=False)
params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
prompts = [[1 + index, *range(5, 36)] for index in range(16)]
work = {
    "generate 1": lambda: llm.generate(prompts[:1], params, use_tqdm=False),
    "generate 16": lambda: llm.generate(prompts, params, use_tqdm=False),
    "stream 1": lambda: list(llm.stream(prompts[0], params)),
}
print("ready", flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    work[line.strip()]()
    print(time.perf_counter() - start, flush=True)
"""
WORK = ("generate 1", "generate 16", "stream 1")


class Worker:
    """Runs an engine of one checkout in a process."""

    def __init__(self, checkout: Path, settings: str, num_tokens: int) -> None:
        self._checkout = checkout
        command = [sys.executable, "-c", WORKER, settings, str(num_tokens)]
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
        self._process = subprocess.Popen(
            command,
            cwd=checkout,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._line()

    def seconds(self, name: str) -> float:
        """Returns how long a piece of work takes."""
        assert self._process.stdin is not None
        print(name, file=self._process.stdin, flush=True)
        return float(self._line())

    def end(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line
        raise SystemExit(f"the engine of {self._checkout} ended")


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="a checkout of the earlier commit")
    parser.add_argument("after", type=Path, help="a checkout of the later one")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64, help="of each request; default: 64")
    parser.add_argument(
        "--settings",
        default='{"model": "demo", "max_num_seqs": 16}',
        help="of the engines, as JSON",
    )
    arguments = parser.parse_args(argv)
    json.loads(arguments.settings)
    with _workers(
        [arguments.before, arguments.after], arguments.settings, arguments.tokens
    ) as workers:
        print(f"{'work':<12} {'before ms':>10} {'after ms':>10} {'ratio':>7} {'quartiles':>15}")
        for name in WORK:
            for worker in workers:
                worker.seconds(name)  # the first run finds nothing in the prefix cache
            pairs = []
            for number in range(arguments.pairs):
                order = workers if number % 2 else workers[::-1]
                took = {worker: worker.seconds(name) for worker in order}
                pairs.append(tuple(took[worker] for worker in workers))
            before, after = (1000 * statistics.median(times) for times in zip(*pairs, strict=True))
            low, ratio, high = statistics.quantiles([second / first for first, second in pairs])
            print(
                f"{name:<12} {before:>10.2f} {after:>10.2f} {ratio:>7.3f} {low:>7.3f} {high:>7.3f}"
            )


@contextlib.contextmanager
def _workers(checkouts: list[Path], settings: str, num_tokens: int) -> Iterator[list[Worker]]:
    with contextlib.ExitStack() as stack:
        workers = [Worker(checkout, settings, num_tokens) for checkout in checkouts]
        for worker in workers:
            stack.callback(worker.end)
        yield workers


if __name__ == "__main__":
    main()
