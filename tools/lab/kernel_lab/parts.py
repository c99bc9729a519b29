"""Holds the parts of a GPU check by name; each yields findings.

`python -m tools.lab.kernel_lab PART` runs one in a process of its own.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pallas_kernels.sets import BACKENDS, KERNEL_BACKENDS, SETS, XLA_BACKENDS
from pallas_kernels.tiles import Tiles
from tools.lab.kernel_lab import (
    environment,
    goals,
    machine_ceilings,
    matmuls,
    one_order,
    pages,
    parity,
    selection_checks,
    specs,
    stability,
)
from tools.lab.kernel_lab.bounds import Ceilings, work
from tools.lab.kernel_lab.children import ENDED_BADLY
from tools.lab.kernel_lab.compare_sets import Row, ceilings_table, compare, table
from tools.lab.kernel_lab.findings import (
    FAILED,
    LEFT_OUT,
    PASSED,
    Finding,
    LeftOut,
    Table,
    judge,
    read,
)
from tools.lab.kernel_lab.kernel_cases import label, make_case, shape_of_spec
from tools.lab.kernel_lab.specs import Spec

SHORT = (
    "llama-3-8b decode 1x2048",
    "llama-3-8b decode 16x2048",
    "llama-3-8b decode 64x2048",
    "llama-3-8b decode 64x2048 int8",
    "llama-3-8b decode 64x2048 uint8",
    "llama-3-8b decode 64 ragged",
    "llama-3-8b chunk 512+3584",
    "llama-3-8b chunk 2048+0",
    "llama-3-8b verify chain 16x8",
    "llama-3-8b verify tree 16x16",
)


CONTIGUOUS = "contiguous"  # the check whose data has the times of attention without pages
CEILINGS = "ceilings"  # the check whose data is a `Ceilings`
PAGES_S = 40  # the time for the timings of pages, most of it compilation


@dataclass(frozen=True, kw_only=True)
class Options:
    """Holds the options of a part.

    Attributes:
        backend: The kernel set.
        specs: The specs of "bench", as `chosen` takes them.
        splits: The numbers of splits that "bench" tries.
        interpret: Kernels run on CPU, and everything is cut small.
        seconds: The time for the part.
        directory: The directory where other parts left their findings.
    """

    backend: str = ""
    specs: str = "short"
    splits: tuple[int, ...] = ()
    interpret: bool = False
    seconds: float = 120.0
    directory: Path | None = None


def _kernel(options: Options) -> bool:
    """Returns whether the backend has to be interpreted; XLA's backends just run on CPU."""
    return options.interpret and options.backend not in XLA_BACKENDS


def _environment(options: Options) -> Iterator[Finding]:
    facts = environment.describe()
    rows = Table(
        "Where this ran", ["what", "value"], [[name, value] for name, value in facts.items()]
    )
    summary = f"{facts['device']}, jax {facts['jax']}"
    yield Finding("environment", PASSED, summary, tables=[rows], data=dict(facts))


def _parity(options: Options) -> Iterator[Finding]:
    yield from parity.findings(options.backend, interpret=_kernel(options), small=options.interpret)


def _stability(options: Options) -> Iterator[Finding]:
    yield from stability.findings(
        options.backend, interpret=_kernel(options), small=options.interpret
    )


def _one_order(options: Options) -> Iterator[Finding]:
    yield from one_order.findings(
        interpret=options.interpret, small=options.interpret, seconds=options.seconds
    )


def _pages(options: Options) -> Iterator[Finding]:
    yield from pages.findings(interpret=options.interpret, small=options.interpret)


def _sampler(options: Options) -> Iterator[Finding]:
    yield from selection_checks.findings(interpret=options.interpret, small=options.interpret)


def _matmuls(options: Options) -> Iterator[Finding]:
    """Checks the first kernel set, because the others share its product kernel."""
    small = options.interpret
    yield from matmuls.findings(
        KERNEL_BACKENDS[0],
        lambda: measure_ceilings(small),
        interpret=small,
        small=small,
        seconds=options.seconds,
    )


def _one_case(options: Options) -> Iterator[Finding]:
    """Runs the small calls that compute-sanitizer watches.

    They are a call with every kind of row, a decode, and the kernels that write and move pages.
    """
    mixed = next(trial for trial in parity.trials() if trial.spec.name == "mixed, empty rows")
    spec = mixed.cut().spec
    decode = dataclasses.replace(spec, contexts=(1, 70, 33), queries=(1, 1, 1))
    for each in (spec, decode):
        out = make_case(each, padding=3, poison=True).run(
            options.backend, interpret=_kernel(options)
        )
        finite = bool(np.isfinite(np.asarray(out).astype(np.float64)).all())
        yield Finding(
            f"one case {options.backend}", PASSED if finite else FAILED, f"finite: {finite}"
        )
    if options.backend in pages.KERNELS:
        yield from pages.findings(
            interpret=options.interpret, small=True, page_dtypes=("bfloat16", "int8")
        )


def _sanitizer(options: Options) -> Iterator[Finding]:
    yield judge(f"compute-sanitizer {options.backend}", lambda: _sanitize(options))


def _sanitize(options: Options) -> Finding:
    program = shutil.which("compute-sanitizer")
    if program is None:
        raise LeftOut("compute-sanitizer is not on PATH")
    name = f"compute-sanitizer {options.backend}"
    command = [program, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "86"]
    command += [
        sys.executable,
        "-m",
        "tools.lab.kernel_lab",
        "one-case",
        "--backend",
        options.backend,
    ]
    flags = "--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer="
    # Each buffer is allocated by itself: in a pool, a read past the end of a buffer would be
    # missed.
    alone = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_FLAGS": flags,
    }
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **alone},
            capture_output=True,
            text=True,
            timeout=options.seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise LeftOut(f"not finished after {options.seconds:.0f} s") from late
    printed = done.stdout + done.stderr
    if "Device not supported" in printed:
        raise LeftOut(
            "compute-sanitizer says that it does not support this device (some virtual machines)"
        )
    if "NotImplementedError" in printed and done.returncode:
        raise LeftOut(
            next(text for text in printed.splitlines() if "NotImplementedError" in text)[:300]
        )
    summary = re.search(r"ERROR SUMMARY: .*", printed)
    text = summary[0] if summary else f"no summary, exit status {done.returncode}"
    passed = done.returncode == 0 and summary is not None
    return Finding(
        name, PASSED if passed else FAILED, text, data={} if passed else {"log": printed[-6000:]}
    )


def choose(names: str) -> list[Spec]:
    """Returns the specs whose label holds one of the comma-separated texts.

    Args:
        names: The texts; "all" for every spec, "short" for a list of ten.

    Raises:
        KeyError: No label holds one of the texts.
    """
    if names == "all":
        return list(specs.SPECS)
    if names == "short":
        return [spec for spec in specs.SPECS if label(spec) in SHORT]
    candidates = [
        spec
        for spec in specs.SPECS
        if any(name.strip() in label(spec) for name in names.split(","))
    ]
    if not candidates:
        raise KeyError(
            f"no shape's name holds {names!r}; there are: {', '.join(map(label, specs.SPECS))}"
        )
    return candidates


def measure_ceilings(small: bool) -> Ceilings:
    """Measures the ceilings, or in small a miniature of them."""
    if small:
        return machine_ceilings.measure(copy_bytes=2**20, matmul_size=128, rounds=1)
    return machine_ceilings.measure()


def contiguous_seconds(findings: Iterable[Finding]) -> dict[str, dict[str, float]]:
    """Returns what the part "contiguous" measured: {library: {spec: seconds}}."""
    ceilings: dict[str, dict[str, float]] = {}
    for finding in findings:
        ceilings |= (
            finding.data["seconds"]
            if finding.check == CONTIGUOUS and finding.data.get("seconds")
            else {}
        )
    return ceilings


def best_of(others: dict[str, dict[str, float]]) -> dict[str, float]:
    """Returns for each spec the least time of any library."""
    best: dict[str, float] = {}
    for seconds in others.values():
        for name, taken in seconds.items():
            best[name] = min(taken, best.get(name, taken))
    return best


def backends_that_broke(directory: Path | None) -> list[str]:
    """Returns the backends whose parity ended with a crash or a hang.

    Their timings would crash or hang too.
    """
    names = []
    for name in BACKENDS:
        findings = read(directory / f"parity-{name}.jsonl") if directory else []
        names += [name] if any(ENDED_BADLY in finding.data for finding in findings) else []
    return names


def _bench(options: Options) -> Iterator[Finding]:
    """Times one kernel set.

    Each set has a process of its own, because a CUDA error spoils the process in which it happens.
    """
    name, small = options.backend, options.interpret
    if name not in BACKENDS:
        reason = f"there is no kernel set of this name among {', '.join(BACKENDS)}"
    else:
        reason = (
            "its parity crashed or hung" if name in backends_that_broke(options.directory) else ""
        )
    if reason:
        yield Finding(f"bench {name}", LEFT_OUT, reason)
        return
    end = time.monotonic() + options.seconds - 10
    measured = measure_ceilings(small)
    yield Finding(
        CEILINGS,
        PASSED,
        _ceilings_in_words(measured),
        tables=[ceilings_table(measured)],
        data=machine_ceilings.as_data(measured),
    )
    interpret = [name] if _kernel(options) else []
    for spec in choose(options.specs):
        spec = spec.cut() if small else spec
        for tiles in _sweep(options, spec):
            settings: dict[str, Any] = {
                "interpret": interpret,
                "layers": 2 if small else None,
                "tiles": tiles,
            }
            [row] = compare(
                [spec], [name], measured, time_left=lambda: time.monotonic() < end, **settings
            )
            splits = ", ".join(
                [
                    *(f"{each.max_splits} splits" for each in tiles.values()),
                    *filter(None, [row.note]),
                ]
            )
            # Yield each row at once, because a later one may hang.
            yield _time(dataclasses.replace(row, note=splits), measured)
            if row.seconds is None:
                break  # the other numbers of splits get the same answer
    if name in pages.KERNELS:
        yield judge("pages: timings", lambda: _page_timings(measured, small, end))


def _sweep(options: Options, spec: Spec) -> list[dict[str, Tiles]]:
    """Returns the tiles to time.

    They are the kernel set's own choice, or, for decode, its rule's choice with each number of
    splits that was asked for.
    """
    rule = SETS[options.backend].tiles
    if not options.splits or rule is None or spec.max_query_len > 1:
        return [{}]
    start = rule(shape_of_spec(spec))
    return [
        {options.backend: dataclasses.replace(start, max_splits=splits)}
        for splits in options.splits
    ]


def _ceilings_in_words(measured: Ceilings) -> str:
    return ", ".join(f"{name}: {value}" for name, value in ceilings_table(measured).rows)


def bench_tables(findings: Sequence[Finding], *, small: bool = False) -> list[Table]:
    """Returns the results of "bench" and "contiguous" as one table, and the goals."""
    timed = [finding for finding in findings if finding.check.startswith("bench ")]
    rows = [Row.of(row, small=small) for finding in timed for row in finding.data.get("rows", [])]
    measured = [
        machine_ceilings.of_data(finding.data) for finding in findings if finding.check == CEILINGS
    ]
    if not rows or not measured:
        return []
    order = [label(spec) for spec in specs.SPECS]
    rows.sort(key=lambda row: order.index(label(row.spec)))
    others = contiguous_seconds(findings)
    tables = [table(rows, measured[0], others), goals.table(rows, measured[0], best_of(others))]
    sizes = goals.block_sizes(rows)
    return [*tables, sizes] if sizes.rows else tables


def _page_timings(measured: Ceilings, small: bool, end: float) -> Finding:
    if not small and (left := end - time.monotonic()) < PAGES_S:
        raise LeftOut(f"{max(0, left):.0f} s were left, and it may need {PAGES_S}")
    return pages.timings(measured, interpret=small, small=small)


def _time(row: Row, measured: Ceilings) -> Finding:
    text = row.note
    if row.seconds is not None:
        bound = measured.bound(work(row.spec))
        text = f"{row.seconds * 1e6:.1f} us, {row.fraction(measured):.3f} of {bound}{', ' if row.note else ''}{row.note}"
    status = FAILED if row.failed else LEFT_OUT if row.seconds is None else PASSED
    return Finding(
        f"bench {row.backend} {label(row.spec)}",
        status,
        text,
        data={"rows": [row.as_data(measured)]},
    )


PARTS: dict[str, Callable[[Options], Iterator[Finding]]] = {
    "environment": _environment,
    "parity": _parity,
    "stability": _stability,
    "one-order": _one_order,
    "pages": _pages,
    "products": _matmuls,
    "sampler": _sampler,
    "one-case": _one_case,
    "sanitizer": _sanitizer,
    "bench": _bench,
}
