"""Measures how much of the pool the scheduler leaves unused, and what it costs the host.

    python tools/lab/bench_scheduler.py --waste

It needs no device and no model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Lets the program run where only jaxpage is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from jaxpage.bench.results import environment
from jaxpage.scheduling import Preemption
from jaxpage.simulation.setup import Setup
from tools.lab.scheduler_lab.host_time import minimum, planning_times, waiting_times
from tools.lab.scheduler_lab.pressure import Mode, press, requests_at_once
from tools.lab.scheduler_lab.saturation import saturate
from tools.lab.scheduler_lab.scheduler_tables import (
    planning_table,
    pressure_dict,
    pressure_table,
    saturation_dict,
    saturation_table,
    waiting_table,
)

NUMS_WAITING = (10, 100, 1_000, 10_000)
NUMS_RUNNING = (64, 256)
ROUNDS = 5
PRESSED = 64  # the number of requests at once
SHARES = (1.0, 0.3)  # shares of the blocks that they need together
MODES: tuple[Mode, ...] = ("recompute", "swap")

Section = tuple[list[str], Any]  # the lines of a table with its title, and the same for JSON


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables that were asked for, or all tables.

    With --json the last line is one JSON object.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if min(*arguments.rates, arguments.seconds) <= 0 or arguments.seeds < 1:
        parser.error("--rates and --seconds must be positive, and --seeds at least 1")
    expected = [name for name in _SECTIONS if getattr(arguments, name)]
    results: dict[str, Any] = {}
    for name in expected or _SECTIONS:
        lines, results[name] = _SECTIONS[name](arguments)
        print("\n".join(lines), end="\n\n", flush=True)
    if arguments.json:
        print(json.dumps({**results, "environment": environment()}, allow_nan=False))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--waste", action="store_true", help="the memory split at saturation, on a virtual clock")
    add(
        "--preemption",
        action="store_true",
        help="recompute or swap, and what new requests wait for, on the same clock",
    )
    add(
        "--pressure",
        action="store_true",
        help="requests at once in a pool that holds a part of them, on the same clock",
    )
    add("--planning", action="store_true", help="host time of a step, by running sequences")
    add("--waiting", action="store_true", help="host time of a step, by waiting requests")
    add("--json", action="store_true", help="one JSON object as the last line")
    add(
        "--dataset",
        default="sharegpt",
        choices=("sharegpt", "alpaca"),
        help="lengths on the virtual clock; default: sharegpt",
    )
    add(
        "--rates",
        type=float,
        nargs="+",
        default=[2.0, 3.0],
        metavar="X",
        help="requests per second; default: 2 3",
    )
    add(
        "--seconds",
        type=float,
        default=1200.0,
        metavar="X",
        help="of arrivals, virtual; default: 1200",
    )
    add("--seeds", type=int, default=3, metavar="N", help="traces per rate; default: 3")
    return parser


def _waste(arguments: argparse.Namespace) -> Section:
    setup = Setup()
    results = {
        f"{rate:g}": saturate(
            setup.new_scheduler, arguments.dataset, rate, arguments.seconds, range(arguments.seeds)
        )
        for rate in arguments.rates
    }
    title = (
        f"Memory: {setup.num_blocks} blocks of {setup.block_size}, OPT-13B on an A100-40GB by a cost model;"
        f" {arguments.dataset}, {arguments.seeds} traces of {arguments.seconds:g} s a rate"
    )
    values = {
        "setup": asdict(setup),
        "dataset": arguments.dataset,
        "seconds": arguments.seconds,
        "rates": [saturation_dict(result) for result in results.values()],
    }
    return [title, *saturation_table("requests/s", results)], values


def _preemption(arguments: argparse.Namespace) -> Section:
    """Compares the paper's rule with that of vLLM's first version.

    In the paper new requests wait until the preempted requests are completed; in vLLM they wait
    until the preempted requests are readmitted.
    """
    rate = arguments.rates[0]
    results = {}
    for mode, wait in itertools.product(MODES, ("readmitted", "completed")):
        # `matmul` forgets the literal types.
        setup = Setup(preemption=Preemption(mode, wait))  # type: ignore[arg-type]
        seeds = range(arguments.seeds)
        results[f"{mode}, {wait}"] = saturate(
            setup.new_scheduler, arguments.dataset, rate, arguments.seconds, seeds
        )
    title = f"Preemption: new requests wait until the preempted are readmitted or completed; {rate:g} requests/s"
    values = {label: saturation_dict(result) for label, result in results.items()}
    return [title, *saturation_table("", results)], values


def _pressure(arguments: argparse.Namespace) -> Section:
    requests = requests_at_once(arguments.dataset, PRESSED)
    results = [press(requests, share, mode) for share, mode in itertools.product(SHARES, MODES)]
    title = f"Pressure: {PRESSED} requests of {arguments.dataset} at once, in a part of the blocks that they need together"
    return [title, *pressure_table(results)], [pressure_dict(result) for result in results]


def _planning(arguments: argparse.Namespace) -> Section:
    times = minimum(
        [time for num in NUMS_RUNNING for time in planning_times(num)] for _ in range(ROUNDS)
    )
    values = [{**asdict(time), "us_per_sequence": time.us_per_sequence} for time in times]
    return ["Planning: one decode step, host time", *planning_table(times)], values


def _waiting(arguments: argparse.Namespace) -> Section:
    times = minimum(waiting_times(NUMS_WAITING) for _ in range(ROUNDS))
    title = "Waiting: one decode step while requests wait; the arrival of one more; the end of one in the middle"
    return [title, *waiting_table(times)], [asdict(time) for time in times]


_SECTIONS: dict[str, Callable[[argparse.Namespace], Section]] = {
    "waste": _waste,
    "preemption": _preemption,
    "pressure": _pressure,
    "planning": _planning,
    "waiting": _waiting,
}


if __name__ == "__main__":
    sys.exit(main())
