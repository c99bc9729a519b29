"""Times the kernels over named shapes, or finds the best tiles.

Times are shown next to measured ceilings, the XLA gather and contiguous attention.

    python tools/bench_kernels.py --specs decode --backends triton,mosaic,scan
    python tools/bench_kernels.py --tune --specs all --backends triton --minutes 9
    python tools/bench_kernels.py --interpret --small --specs 16x2048 --backends reference

A time is that of one call on the device, of many in one program, which read other keys and values
each time (see tools/lab/kernel_lab/timing.py for what is included). --tune writes a file per kind
of GPU, from which `paged_attention` then takes its tiles; shapes that were tuned before and are not
now stay in it. A backend that refuses a call, and tiles that do not compile, are reported with the
reason. A CUDA error spoils the process, so nothing is timed after it: then time the other backends
in a run of their own, as tools/lab/gpu_check.py does. The last line of standard output is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

# Lets the program run where only jaxpage is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pallas_kernels.sets import BACKENDS, DEFINITION, GPU_BACKENDS, XLA_BACKENDS
from pallas_kernels.tiles import TUNED, Shape, Tiles, read_tuned, write_tuned
from tools.lab.kernel_lab import environment, goals, machine_ceilings, pages
from tools.lab.kernel_lab.bounds import Ceilings
from tools.lab.kernel_lab.compare_sets import ceilings_table, compare, table
from tools.lab.kernel_lab.findings import FAILED, PASSED, Finding, Table, append, read
from tools.lab.kernel_lab.kernel_cases import label
from tools.lab.kernel_lab.parts import best_of, choose, contiguous_seconds, measure_ceilings
from tools.lab.kernel_lab.record import append_section, section
from tools.lab.kernel_lab.specs import Spec
from tools.lab.kernel_lab.tuner import (
    RULES,
    OnDevice,
    Tuned,
    by_shape,
    fastest,
    refusal,
    starts,
    tune,
)
from tools.lab.progress import Bar

ROOT = Path(__file__).parents[1]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--specs",
        default="all",
        help='texts of shape names, comma-separated; "short": a list of ten; default: all',
    )
    parser.add_argument("--list", action="store_true", help="list the shapes, and do nothing")
    backends = ",".join(name for name in GPU_BACKENDS if name != DEFINITION)
    parser.add_argument("--backends", default=backends, help=f"default: {backends}")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="what no longer fits is left out; default: 9"
    )
    parser.add_argument(
        "--tune", action="store_true", help="find tiles for the shapes' kinds, and write them"
    )
    parser.add_argument(
        "--tuned-directory",
        type=Path,
        default=TUNED,
        help="where --tune writes; default: the package's",
    )
    parser.add_argument(
        "--out", type=Path, help="Markdown file that gets a section with the tables"
    )
    parser.add_argument(
        "--to", type=Path, help="file to which the finding is appended as a line of JSON"
    )
    parser.add_argument("--json", type=Path, help="file that also gets the JSON of the last line")
    parser.add_argument(
        "--no-contiguous", action="store_true", help="without torch's contiguous attention"
    )
    parser.add_argument(
        "--interpret", action="store_true", help="on CPU: kernels are interpreted; needs --small"
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="cut the shapes small: proves the program, not the speed",
    )
    arguments = parser.parse_args(argv)
    arguments.backends = arguments.backends.split(",")
    if unknown := set(arguments.backends) - set(BACKENDS):
        parser.error(f"--backends: {', '.join(sorted(unknown))} not among {', '.join(BACKENDS)}")
    if (
        arguments.tune
        and (xla := set(arguments.backends) & set(XLA_BACKENDS))
        and len(xla) == len(arguments.backends)
    ):
        parser.error(f"--tune: {', '.join(sorted(xla))} take no tiles")
    if arguments.interpret and not arguments.small:
        parser.error("--interpret needs --small: a real shape takes hours there")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns the exit status."""
    arguments = parse(argv)
    try:
        specs = choose(arguments.specs)
    except KeyError as unknown:
        sys.exit(str(unknown.args[0]))
    if arguments.list:
        print("\n".join(map(label, specs)))
        return 0
    deadline = time.monotonic() + arguments.minutes * 60
    directory = Path(tempfile.mkdtemp(prefix="bench_kernels_"))
    if not (arguments.small or arguments.tune or arguments.no_contiguous):
        time_contiguous(arguments.specs, directory)  # it must end before JAX takes the GPU's memory
    platform = jax.devices()[0].platform
    if platform != "gpu" and not arguments.small:
        print(
            "There is no GPU here, or JAX does not see it. --interpret --small runs a miniature on CPU.",
            file=sys.stderr,
        )
        return 2
    measured = measure_ceilings(arguments.small)
    print(ceilings_table(measured).plain(), flush=True)
    specs = [spec.cut() for spec in specs] if arguments.small else specs
    work = tuning if arguments.tune else timing
    finding = work(specs, arguments, measured, deadline, directory)
    finding.tables.insert(0, ceilings_table(measured))
    return report(finding, arguments, measured)


def time_contiguous(specs: str, directory: Path) -> None:
    """Times contiguous attention in a process of its own, which ends before JAX starts."""
    command = [
        sys.executable,
        str(ROOT / "tools" / "lab" / "time_contiguous_attention.py"),
        "--specs",
        specs,
    ]
    try:
        subprocess.run(
            [*command, "--to", str(directory / "contiguous.jsonl")], check=False, timeout=240
        )
    except subprocess.TimeoutExpired:
        print("contiguous: not finished after 240 s", file=sys.stderr)
    for finding in read(directory / "contiguous.jsonl"):
        print(f"{finding.check}: {finding.status}: {finding.summary}", flush=True)
        for each in finding.tables:
            print(each.plain(), flush=True)


def timing(
    specs: Sequence[Spec],
    arguments: argparse.Namespace,
    measured: Ceilings,
    deadline: float,
    directory: Path,
) -> Finding:
    """Times all backends on all specs."""
    bar = Bar(len(specs) * len(arguments.backends), "timing")
    rows = compare(
        specs,
        arguments.backends,
        measured,
        interpret=[
            name for name in arguments.backends if arguments.interpret and name not in XLA_BACKENDS
        ],
        time_left=lambda: time.monotonic() < deadline - 20,
        done=lambda row: bar.step(f"{label(row.spec)} {row.backend}"),
        layers=2 if arguments.small else None,
    )
    bar.close()
    contiguous = read(directory / "contiguous.jsonl")
    others = contiguous_seconds(contiguous)
    tables = [table(rows, measured, others), goals.table(rows, measured, best_of(others))]
    data: dict[str, Any] = {"rows": [row.as_data(measured) for row in rows]}
    data["contiguous"] = others.get("contiguous", {})
    if set(pages.KERNELS) & set(arguments.backends) and time.monotonic() < deadline - 20:
        copied = pages.timings(measured, interpret=arguments.interpret, small=arguments.small)
        tables, data["pages"] = [*tables, *copied.tables], copied.data["rows"]
    tables += [each for finding in contiguous for each in finding.tables]
    timed = sum(row.seconds is not None for row in rows)
    status = FAILED if any(row.failed for row in rows) else PASSED
    return Finding(
        "bench_kernels", status, f"{timed} of {len(rows)} timed", tables=tables, data=data
    )


def tuning(
    specs: Sequence[Spec],
    arguments: argparse.Namespace,
    measured: Ceilings,
    deadline: float,
    directory: Path,
) -> Finding:
    """Tunes all shapes, and shares the remaining time evenly among those that still wait.

    It writes after each shape, so that no result is lost. Where several kernel sets were tuned for
    a shape, it also writes which is fastest.
    """
    kind = jax.devices()[0].device_kind
    tuned_sets = [name for name in arguments.backends if name in RULES]
    jobs = [(name, *job) for name in tuned_sets for job in by_shape(specs).items()]
    made = Table(
        "Tiles",
        ["backend and shape", "tiles", "x ceiling", "of the start", "tried", "failed", "finished"],
    )
    data: list[dict[str, Any]] = []
    path = ""
    compared: dict[Shape, dict[str, Tuned]] = {}
    bar = Bar(len(jobs), "shape")
    for index, (backend, shape, group) in enumerate(jobs):
        until = time.monotonic() + (deadline - time.monotonic()) / (len(jobs) - index)
        start = read_tuned(kind, arguments.tuned_directory).get(backend, {}).get(str(shape))
        begin = [*starts(backend, shape), *([start] if start else [])]
        refusals = {spec: reason for spec in group if (reason := refusal(backend, spec))}
        group = [spec for spec in group if spec not in refusals]
        if not group:
            reason = next(iter(refusals.values()))
            made.rows.append([f"{backend} {shape}", f"none: {reason}", *["-"] * 5])
            bar.step()
            continue
        device = OnDevice(
            backend,
            group,
            measured,
            interpret=arguments.interpret,
            layers=2 if arguments.small else None,
        )
        tuned = tune(
            shape,
            group,
            device.measure,
            begin,
            prefetch=device.prefetch,
            deadline=until,
            progress=bar.show,
        )
        device.close()
        if tuned.best:
            known = read_tuned(kind, arguments.tuned_directory)
            known.setdefault(backend, {})[str(shape)] = tuned.best
            compared.setdefault(shape, {})[backend] = tuned
            first = fastest(compared[shape])
            sets = {str(shape): first} if first else {}
            path = str(write_tuned(kind, known, arguments.tuned_directory, fastest=sets))
        made.rows.append(_row_of_tuned(backend, tuned, len(group), begin[0]))
        data.append(_data_of_tuned(backend, tuned))
        bar.step()
    bar.close()
    return Finding(
        "tuning",
        "passed",
        f"written to {path or 'nothing'}",
        tables=[made],
        data={"tuned": data, "path": path},
    )


def _row_of_tuned(backend: str, tuned: Tuned, num_specs: int, start: Tiles) -> list[str]:
    counts = [
        str(len(tuned.seconds)),
        str(len(tuned.failures)),
        "yes" if tuned.finished else "no: time was up",
    ]
    if tuned.best is None:
        reason = next(iter(tuned.failures.values()), "time was up")
        return [f"{backend} {tuned.shape}", f"none: {reason}", "-", "-", *counts]
    best = tuned.seconds[tuned.best]
    tiles = ", ".join(f"{name} {value}" for name, value in asdict(tuned.best).items())
    gain = best / tuned.seconds[start]
    return [f"{backend} {tuned.shape}", tiles, f"{best / num_specs:.2f}", f"{gain:.2f}", *counts]


def _data_of_tuned(backend: str, tuned: Tuned) -> dict[str, Any]:
    tried = [
        {
            "tiles": asdict(tiles),
            "score": None if tiles in tuned.failures else score,
            "failure": tuned.failures.get(tiles),
        }
        for tiles, score in tuned.seconds.items()
    ]
    best = asdict(tuned.best) if tuned.best else None
    return {
        "backend": backend,
        "shape": str(tuned.shape),
        "best": best,
        "finished": tuned.finished,
        "tried": tried,
    }


def report(finding: Finding, arguments: argparse.Namespace, measured: Ceilings) -> int:
    """Prints and writes the finding, and returns the exit status."""
    for each in finding.tables[1:]:
        print(f"\n{each.plain()}")
    print(f"\n{finding.check}: {finding.summary}")
    where = environment.describe()
    if arguments.to:
        append(arguments.to, finding)
    if arguments.out:
        date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        append_section(
            arguments.out, section([finding], where, date=date, command="tools/bench_kernels.py")
        )
    data = json.dumps(
        {**finding.data, "ceilings": machine_ceilings.as_data(measured), "environment": where}
    )
    if arguments.json:
        arguments.json.write_text(data + "\n", encoding="utf-8")
    print(data, flush=True)
    return int(finding.status == FAILED)


if __name__ == "__main__":
    sys.exit(main())
