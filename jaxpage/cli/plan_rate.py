"""Finds for `jaxpage plan --slo` the highest request rate that a configuration sustains.

It simulates the engine with step costs that are measured on this machine or read from a file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from jaxpage.assembly import Hooks
from jaxpage.assembly.planning import EngineSpec
from jaxpage.bench import measure_shapes
from jaxpage.cli.plan import spec_of
from jaxpage.errors import UsageError
from jaxpage.memory import BlockManager, BlockPool, BlockTables
from jaxpage.replay import open_engine
from jaxpage.scheduling import Preemption
from jaxpage.settings.engine_config import NO_LOG, EngineConfig
from jaxpage.simulation import (
    LENGTHS,
    SEEDS,
    SUSTAINED,
    AtRate,
    CostModel,
    PagedScheduler,
    Question,
    ShapeCost,
    at_rate,
    costs_as_dict,
    highest_rate,
    read_costs,
)
from jaxpage.tables import align

_DEFAULTS = {"dataset": "sharegpt", "max_input": 512, "max_output": 512}
_COLUMNS = (
    "requests/s",
    "kept",
    "p99 TTFT (ms)",
    "p99 TPOT (ms)",
    "running",
    "pool in use",
    "preemptions",
)


def run(arguments: argparse.Namespace, config: EngineConfig, explicit: Mapping[str, Any]) -> int:
    """Prints a table or one JSON object.

    Args:
        arguments: The command line.
        config: The settings of the engine.
        explicit: Fields of `ModelLayout` from the command line; see `cli.plan.run`.

    Returns:
        The exit status, which is 1 if `--rate` is not sustained.

    Raises:
        UsageError: A flag is wrong, or the model cannot be simulated.
        JaxpageError: The model cannot be planned; see `cli.plan.run`.
    """
    for name, default in _DEFAULTS.items():
        setattr(
            arguments,
            name,
            default if getattr(arguments, name) is None else getattr(arguments, name),
        )
    slo = _check(arguments, config)
    spec, cost = _open(arguments, config, explicit)
    length = spec.memory.max_model_len
    # Half of the context is left for the output, as in `bench throughput`.
    max_input = min(arguments.max_input, length // 2)
    max_output = min(arguments.max_output, length - max_input)
    question = Question(
        lambda: _scheduler(spec, config), cost, slo, arguments.dataset, max_input, max_output
    )
    requested = at_rate(question, arguments.rate) if arguments.rate else None
    by_seed = [highest_rate(question, [seed], near=arguments.rate or 1.0) for seed in SEEDS]
    rates = [each.rate for each in by_seed if each.is_sustained]
    highest = at_rate(question, min(each.rate for each in by_seed))
    if arguments.json:
        result = {
            "model": config.model,
            "slo_ms": {name: 1000 * value for name, value in slo.items()},
            **{"dataset": arguments.dataset, "max_input": max_input, "max_output": max_output},
            "highest_rate": asdict(highest) if len(rates) == len(SEEDS) else None,
            "highest_rate_by_seed": rates,
            "at_rate": asdict(requested) if requested else None,
            "costs": costs_as_dict(cost),
        }
        print(json.dumps(result, allow_nan=False))
    else:
        print("\n".join(_lines(question, highest, rates, requested)))
    return int(requested is not None and not requested.is_sustained)


def _check(arguments: argparse.Namespace, config: EngineConfig) -> dict[str, float]:
    """Checks the flags, and returns the SLO (service level objective) in seconds."""
    slo: dict[str, float] = {}
    for part in arguments.slo.split(","):
        name, _, value = part.partition("=")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = 0.0
        # `not >` refuses NaN, too.
        if name not in ("ttft", "tpot", "e2el") or not milliseconds > 0:
            raise UsageError(f"--slo takes ttft=MS,tpot=MS,e2el=MS, got {part!r}")
        slo[name] = milliseconds / 1000
    if not {"ttft", "e2el"} & {*slo}:
        raise UsageError("--slo needs ttft or e2el: without one of them requests may wait for ever")
    if arguments.rate is not None and not arguments.rate > 0:
        raise UsageError(f"--rate must be more than 0, got {arguments.rate}")
    if arguments.dataset not in LENGTHS:
        raise UsageError(
            f"--dataset must be one of {', '.join(LENGTHS)}, got {arguments.dataset!r}"
        )
    if min(arguments.max_input, arguments.max_output) < 1:
        raise UsageError("--max-input and --max-output must be at least 1")
    for name in ("memory", "device"):
        if getattr(arguments, name) is not None and not arguments.costs:
            raise UsageError(
                f"--{name} is another device than this one: --slo then needs --costs FILE"
            )
    for name, plain in (("speculative_config", (None,)), ("num_scheduler_steps", (1, "auto"))):
        if getattr(config, name) not in plain:
            raise UsageError(f"--slo simulates steps of one token: {name} must be {plain[0]}")
    return slo


def _open(
    arguments: argparse.Namespace, config: EngineConfig, explicit: Mapping[str, Any]
) -> tuple[EngineSpec, CostModel]:
    if arguments.costs:
        try:
            cost = read_costs(arguments.costs)
        except ValueError as error:
            raise UsageError(f"--costs {error}") from None
        spec = spec_of(arguments, config, explicit)
    else:
        # The steps that are measured must be those that `_scheduler` simulates.
        measured = {**explicit, "num_scheduler_steps": 1, "preemption_mode": "recompute"}
        config = config.replace(**measured, enable_prefix_caching=False, **NO_LOG)
        built = open_engine(config, Hooks(progress=not arguments.json))
        spec = built.spec
        cost = ShapeCost(*measure_shapes(built))
    if len(spec.groups) > 1 or spec.groups[0].sliding_window:
        raise UsageError(
            "--slo simulates models whose layers all see the whole sequence; this one has "
            "sliding windows"
        )
    return spec, cost


def _scheduler(spec: EngineSpec, config: EngineConfig) -> PagedScheduler:
    """Returns a scheduler like the engine's, without a prefix cache.

    The prompts of the trace share no prefix.
    """
    # There is one cache group: `_open` refuses models with several.
    [blocks] = spec.blocks
    manager = BlockManager(
        [BlockTables(BlockPool(blocks.stop, first=blocks.start), spec.memory.block_size)], None
    )
    limits = replace(spec.limits, num_steps=1, adapts_num_steps=False)
    return PagedScheduler(
        limits, manager, max_num_seqs=config.max_num_seqs, preemption=Preemption("recompute")
    )


def _lines(
    question: Question, highest: AtRate, rates: Sequence[float], requested: AtRate | None
) -> list[str]:
    slo = ", ".join(f"{name} <= {1000 * seconds:g} ms" for name, seconds in question.slo.items())
    lines = [
        f"Simulated: {len(SEEDS)} times {question.num_requests} requests of "
        f"{question.dataset}, Poisson arrivals; sustained: "
        f"{SUSTAINED:.0%} of the requests have {slo}.",
        "",
        *align([_COLUMNS, *(_cells(each) for each in (highest, requested) if each)]),
        "",
    ]
    if len(rates) < len(SEEDS):
        lines.append("No rate is sustained: a request alone is slower than this.")
    else:
        shown = ", ".join(f"{rate:,.4g}" for rate in sorted(rates))
        lines.append(
            f"The highest rate that all traces sustain is {min(rates):,.4g} requests/s "
            f"({shown} by trace)."
        )
    if requested:
        lines.append(
            f"{requested.rate:g} requests/s are "
            f"{'' if requested.is_sustained else 'not '}sustained."
        )
    return lines


def _cells(each: AtRate) -> tuple[str, ...]:
    return (
        f"{each.rate:,.4g}",
        f"{each.share_within_slo:.1%}",
        f"{1000 * each.p99_ttft:.1f}",
        f"{1000 * each.p99_tpot:.1f}",
        f"{each.running:.1f}",
        f"{each.pool_in_use:.1%}",
        f"{each.num_preemptions}",
    )
