"""Times whole decode and prompt-chunk steps on this machine's device, and their parts.

    python tools/bench_step.py --rows 2,64 --contexts 1024,8192 --chunks 2048 --json steps.json

The parts are products, attention, sampler and host. The shapes are those of Llama-3-8B ("8b"),
Llama-3.2-1B ("1b", with a head of its own) or a tiny model; weights are random numbers that are
made on the device. Without --rows and --chunks the usual cases are timed. "ms" is a step on the
device, where steps queue up; "host gap" is what is added where the host reads the drawn tokens
before it calls the next step; "call" is the time until a call returns. The parts are timed alone,
so their sum is not the step. "GB/s" is weights, keys and values, each once, divided by the time of
a step.

Standard output ends with a line of JSON. Cases for which --seconds leaves no time are named.
tools/lab/gpu_check.py runs it with --to.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax

# Lets the program run where jaxpage is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.lab.kernel_lab.findings import (
    FAILED,
    LEFT_OUT,
    PASSED,
    Finding,
    Table,
    append,
    first_line,
)

try:
    from tools.lab.step_times import (
        COLUMNS,
        MODELS,
        SAMPLING,
        StepCase,
        cells,
        time_step,
        usual_cases,
    )

    MISSING = ""
except ImportError as absent:
    MISSING = absent.name or str(absent)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default="8b", help="of 8b, 1b, tiny; comma-separated; default: 8b"
    )
    parser.add_argument("--rows", default="", help="sequences that decode")
    parser.add_argument(
        "--contexts", default="1024", help="tokens of each, the new one included; default: 1024"
    )
    parser.add_argument(
        "--chunks",
        default="",
        help="tokens of a prompt chunk, each with a context of its own length",
    )
    parser.add_argument(
        "--sampling", default="greedy", help="greedy, random, top_p, top_k_top_p; default: greedy"
    )
    parser.add_argument(
        "--layers", type=int, help="fewer layers than the model has: they compile faster"
    )
    parser.add_argument("--backend", default="auto", help="kernel set; default: auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--seconds", type=float, default=480, help="no case is begun that may not fit; default: 480"
    )
    parser.add_argument(
        "--round", type=float, default=0.1, help="seconds of each of five rounds; default: 0.1"
    )
    parser.add_argument("--json", type=Path, help="file that also gets the JSON of the last line")
    parser.add_argument(
        "--to", type=Path, help="file to which findings are appended as lines of JSON"
    )
    return parser.parse_args(argv)


def cases(arguments: argparse.Namespace) -> list[StepCase]:
    """Returns the cases that the command line asks for."""
    models, layers = arguments.models.split(","), arguments.layers
    samplings = arguments.sampling.split(",")
    for name, names, known in (("--models", models, MODELS), ("--sampling", samplings, SAMPLING)):
        if unknown := set(names) - set(known):
            sys.exit(f"{name}: {', '.join(sorted(unknown))} not among {', '.join(known)}")
    rows, contexts, chunks = (
        _numbers(text) for text in (arguments.rows, arguments.contexts, arguments.chunks)
    )
    if not rows and not chunks:
        return list(usual_cases(models, layers))
    decodes = itertools.product(models, rows, contexts, samplings)
    return [
        *(
            StepCase(model, count, context, 0, how, layers)
            for model, count, context, how in decodes
        ),
        *(
            StepCase(model, 1, chunk, chunk, how, layers)
            for model, chunk, how in itertools.product(models, chunks, samplings)
        ),
    ]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def main(argv: list[str] | None = None) -> int:
    """Times the cases and returns the exit status."""
    arguments = parse(argv)
    end = time.monotonic() + arguments.seconds

    def report(finding: Finding) -> None:
        if arguments.to:
            append(arguments.to, finding)
        print(f"{finding.check}: {finding.status}: {finding.summary}", flush=True)

    if MISSING:
        report(Finding("steps", LEFT_OUT, f"no {MISSING} here"))
        return 0
    chosen = cases(arguments)
    if (platform := jax.default_backend()) != "gpu" and any(
        case.model != "tiny" for case in chosen
    ):
        sys.exit(
            f"--models {arguments.models}: steps of these sizes are for GPUs, and JAX's device here "
            f"is a {platform}. `--models tiny` runs on every device."
        )
    table = Table("Whole steps (ms)", [*COLUMNS])
    rows = list[dict[str, Any]]()
    max_seconds = 0.0
    failed = 0
    for case in chosen:
        began = time.monotonic()
        if began + max_seconds > end:
            report(
                Finding(
                    f"step {case}",
                    LEFT_OUT,
                    f"{max(0.0, end - began):.0f} s were left, and one took {max_seconds:.0f}",
                )
            )
            continue
        try:
            times = time_step(
                case, backend=arguments.backend, dtype=arguments.dtype, round_s=arguments.round
            )
        except Exception as error:  # the other cases go on
            failed += 1
            report(Finding(f"step {case}", FAILED, first_line(error)))
            continue
        max_seconds = max(max_seconds, time.monotonic() - began)
        table.rows.append(cells(case, times))
        rows.append(
            {**dataclasses.asdict(case), **dataclasses.asdict(times), "host_gap": times.host_gap}
        )
        summary = ", ".join(
            f"{name} {cell}"
            for name, cell in zip(table.columns[1:], table.rows[-1][1:], strict=True)
        )
        report(Finding(f"step {case}", PASSED, summary, data=rows[-1]))
    report(
        Finding(
            "steps",
            FAILED if failed else PASSED,
            f"{len(rows)} timed",
            tables=[table] if rows else [],
        )
    )
    print(f"\n{table.plain()}" if rows else "")
    device = jax.devices()[0]
    data = json.dumps({"device": device.device_kind, "jax": jax.__version__, "rows": rows})
    if arguments.json:
        arguments.json.write_text(data + "\n", encoding="utf-8")
    print(data, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
