"""Measures the seconds from the start of a process to its first token, for `jaxpage bench startup`.

It shows the phases of a start with compiled executables in the cache, and of one without, and the
seconds from sleep to a token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tqdm import tqdm

from jaxpage.bench.results import environment, print_result
from jaxpage.bench.studies import startup_process
from jaxpage.bench.throughput import check_writable
from jaxpage.checkpoints.finding import FETCHABLE, resolve_model
from jaxpage.errors import JaxpageError, UsageError
from jaxpage.settings.engine_config import NO_LOG, EngineConfig
from jaxpage.tables import align

Phases = dict[str, float]  # seconds by phase, in the order of a start


def run_startup(arguments: argparse.Namespace, config: EngineConfig) -> None:
    """Prints a table and, as the last line, one JSON object.

    Raises:
        UsageError: A flag has a wrong value.
        JaxpageError: A start fails.
    """
    if arguments.starts < 1:
        raise UsageError(f"--starts must be at least 1, got {arguments.starts}")
    check_writable("--output-json", arguments.output_json)
    with (
        tempfile.TemporaryDirectory(prefix="jaxpage-startup-") as cache,
        tqdm(total=1 + arguments.starts, desc="Starting", unit="start") as bar,
    ):
        starts = []
        # The first start finds an empty cache of executables and fills it; it is the cold one.
        for _ in range(1 + arguments.starts):
            starts.append(_start(config, Path(cache)))
            bar.update()
    cold, *warm = [phases for phases, _ in starts]
    waking = {name: median(each[name] for _, each in starts) for name in starts[0][1]}
    shown = {name: median(start[name] for start in warm) for name in cold}
    total = median(sum(start.values()) for start in warm)
    print(table(cold, shown, total, waking))
    result = {
        "cold": cold,
        "warm": warm,
        "cold_seconds": sum(cold.values()),
        "warm_seconds": total,
        "waking": waking,
        "config": config.model_dump(),
        "environment": environment(),
    }
    print_result(result, arguments)


def table(cold: Phases, warm: Phases, warm_total: float, waking: Phases) -> str:
    """Returns a table with a row for each phase.

    Args:
        cold: The phases of the start with an empty cache.
        warm: The median phases of the other starts.
        warm_total: The median of the sums, which is not the sum of the medians.
        waking: The median seconds from sleep to a token, by level.
    """
    rows = [
        ["seconds", "cold", "warm"],
        *([name, f"{cold[name]:.2f}", f"{warm[name]:.2f}"] for name in cold),
    ]
    rows.append(["total", f"{sum(cold.values()):.2f}", f"{warm_total:.2f}"])
    rows += [[name, "", f"{seconds:.2f}"] for name, seconds in waking.items()]
    return "\n".join(align(rows, num_words=1))


def _start(config: EngineConfig, cache: Path) -> tuple[Phases, Phases]:
    """Starts a process with the given cache; returns its phases, and the seconds of waking.

    The next start finds what this one compiled and measured. Fetched models stay in the user's
    cache.
    """
    variables = {**os.environ, "JAXPAGE_CACHE_DIR": str(cache)}
    # There the first start could find executables, and would not be cold.
    variables.pop("JAX_COMPILATION_CACHE_DIR", None)
    command: Sequence[str] = [sys.executable, "-m", startup_process.__name__]
    began = time.time()
    # Fetched models are in the cache of this process, and the other one has a cache of its own.
    model = str(resolve_model(config.model)) if config.model in FETCHABLE else config.model
    settings = json.dumps(config.replace(model=model, **NO_LOG).explicit_settings())
    done = subprocess.run(
        command, input=settings, env=variables, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise JaxpageError(
            f"A start failed with status {done.returncode}:\n{done.stderr.strip()[-2000:]}"
        )
    # Libraries may print lines of their own before the answer.
    answer = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        raise JaxpageError(answer["error"])
    marks = {"starting Python": began, **answer["phases"]}
    pairs = itertools.pairwise(marks.items())
    return {name: end - start for (name, start), (_, end) in pairs}, answer["waking"]
