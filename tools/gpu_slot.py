"""Uses a GPU that is there for a few minutes: what matters most first, and nothing done twice.

    python tools/gpu_slot.py                   # on the GPU's machine; again until nothing is open
    python tools/gpu_slot.py record --results results.jsonl
    python tools/gpu_slot.py --rehearse        # a miniature of all of it on a CPU

It finds out whether the kernels are right, and times whole steps of an 8B shape, the engine,
attention alone next to torch's, FlashAttention-3's and the ceilings; then it looks for faster
tiles. Each part is a process of its own with a time limit: one that crashes or hangs is a line of
the report. If the first one fails, a step of a tiny model, all others run without CUDA graphs. A
part that has ended is not run again by a later call. All parts and calls share what was compiled.

Set JAXPAGE_COMMIT to the commit on a machine that gets the files without their repository.

results.jsonl has everything, report.md the same for people, logs.txt what failures printed; at most
eight files in all, in $OUT or --out. Exit status: 0 nothing failed, 1 something failed (in a
rehearsal also what was left out and needs no more than this repository's list of packages), 2 there
is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Lets the program run where jaxpage is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.lab.kernel_lab.check import Check, has_gpu, nothing
from tools.lab.kernel_lab.children import Child, run_all
from tools.lab.kernel_lab.environment import wait_for_gpu
from tools.lab.kernel_lab.findings import FAILED, PASSED, Finding
from tools.lab.kernel_lab.record import count_findings
from tools.lab.slot_parts import CANARY, NO_GRAPHS, Part, groups, with_flag
from tools.lab.slot_results import ENVIRONMENT, RESULTS, Results, Screen, lines, machine, record

ROOT = Path(__file__).resolve().parents[1]
# The packages that jaxpage needs and the GPU's machine lacks; see constraints/gpu-machine.txt.
WHEELS = "constraints/gpu-wheels.txt"
IMPORTS = {
    "llguidance": "the engine",
    "pydantic": "the engine",
    "flash_attn3_jax": "FlashAttention-3",
}
PLATFORMS = ("manylinux_2_31", "manylinux_2_28", "manylinux_2_17", "manylinux2014")
BUDGET_S, REHEARSAL_S = 570, 3000
NO_GPU = "There is no GPU here, or JAX does not see it. --rehearse runs a miniature on a CPU."


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "step", nargs="?", choices=["run", "record"], default="run", help="default: run"
    )
    parser.add_argument(
        "--budget", type=float, help=f"seconds; what no longer fits stays open; default: {BUDGET_S}"
    )
    parser.add_argument(
        "--only",
        default="",
        help='parts whose name holds one of these: "parity,steps"; default: all',
    )
    parser.add_argument(
        "--again", action="store_true", help="run parts again that have ended, or those of --only"
    )
    parser.add_argument(
        "--list", action="store_true", help="list the parts and how they ended, and do nothing"
    )
    parser.add_argument(
        "--wheels",
        action="store_true",
        help="print how to fetch and install the packages that lack",
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="on a CPU: small shapes, kernels interpreted"
    )
    parser.add_argument(
        "--out", type=Path, help="directory for at most eight files; default: $OUT, else as --state"
    )
    parser.add_argument(
        "--state", type=Path, help="directory that later calls find again; default: .gpu_slot/..."
    )
    parser.add_argument(
        "--results", type=Path, help="a results.jsonl, for record; default: that of --state"
    )
    parser.add_argument(
        "--document",
        type=Path,
        default=ROOT / "docs" / "gpu-results.md",
        help="file that record writes",
    )
    arguments = parser.parse_args(argv)
    arguments.state = arguments.state or ROOT / ".gpu_slot" / (
        "rehearsal" if arguments.rehearse else "gpu"
    )
    arguments.out = arguments.out or Path(os.environ.get("OUT") or arguments.state)
    if arguments.budget is not None and arguments.budget <= 0:
        parser.error(f"--budget must be above 0, got {arguments.budget:g}")
    arguments.budget = arguments.budget or (REHEARSAL_S if arguments.rehearse else BUDGET_S)
    return arguments


def wheels() -> str:
    """Returns the commands that fetch and install the packages."""
    platforms = " ".join(f"--platform {name}_x86_64" for name in PLATFORMS)
    fetch = f"--no-deps --only-binary=:all: --python-version 3.12 --implementation cp {platforms} -d .whl -r {WHEELS}"
    install = "--no-index --no-deps --target .site .whl/*.whl && export PYTHONPATH=$PWD/.site"
    return f"python3 -m pip download {fetch}\npython3 -m pip install {install}"


def missing() -> str:
    """Returns a line about missing packages and how to get them; "" if all are there."""
    absent = [
        f"{name} ({use})" for name, use in IMPORTS.items() if importlib.util.find_spec(name) is None
    ]
    return (
        f"missing: {', '.join(absent)}: python3 -m pip install --no-deps -r {WHEELS}"
        if absent
        else ""
    )


class Slot:
    """Runs the parts that are open, within a time."""

    def __init__(
        self, check: Check, results: Results, parts: list[list[Part]], screen: Screen
    ) -> None:
        self.check, self.results, self.parts, self.screen = check, results, parts, screen
        self._began = time.monotonic()
        self._failed = False

    def open_parts(self, only: Sequence[str], again: bool) -> list[list[Part]]:
        """Returns the parts that are to be run, as far as that does not depend on other parts."""
        chosen = [
            [part for part in group if not only or any(text in part.name for text in only)]
            for group in self.parts
        ]
        ended = (PASSED, FAILED)
        left = [
            [part for part in group if again or self.results.verdict(part.name) not in ended]
            for group in chosen
        ]
        return [group for group in left if group]

    def probe(self, deadline: float) -> str:
        """Asks for the machine; returns why nothing can be done here, "" if something can."""
        old = self.results.parts.get(ENVIRONMENT)
        before = machine(self.results.findings).get("device")
        others = set(self.results.parts) - {ENVIRONMENT}
        self._run([self.check.environment()], deadline)
        device, reason = machine(self.results.findings).get("device"), ""
        if not self.check.interpret and not has_gpu(self.results.findings):
            reason = NO_GPU
        elif others and before != device:
            reason = f"{self.results.state} has results of {before}, and this is {device}: name another --state."
        if reason and others and old:
            self.results.put(ENVIRONMENT, old)
        return reason

    def run(self, groups: list[list[Part]], deadline: float) -> int:
        """Runs the parts; returns the exit status."""
        for group in groups:
            expected = [
                part
                for part in group
                if not part.if_failed or self.results.verdict(part.if_failed) == FAILED
            ]
            self._run([self._as_it_can_run(part.child) for part in expected], deadline)
        return int(self._failed)

    def _as_it_can_run(self, child: Child) -> Child:
        """Returns the part's process, without CUDA graphs if a step of a tiny model failed."""
        fails = child.name != CANARY and self.results.verdict(CANARY) == FAILED
        return with_flag(child, NO_GRAPHS) if fails else child

    def _run(self, children: list[Child], deadline: float) -> None:
        began = time.monotonic()
        for child in children:
            child.to.unlink(missing_ok=True)

        def note_finding(child: Child, finding: Finding) -> None:
            self.results.add(child.name, finding)

        def note_end(child: Child, findings: list[Finding]) -> None:
            findings = findings or [nothing(child)]
            verdict = self.results.end(child.name, findings, time.monotonic() - began)
            self._failed |= verdict.status == FAILED
            title = f"{time.monotonic() - self._began:4.0f} s  {child.name}: {verdict.status}"
            title += f" ({verdict.summary}; {verdict.seconds:.0f} s)"
            self.screen.say("\n".join([title, *lines(child.name, findings)]))

        run_all(
            children,
            deadline=deadline,
            jobs=min(len(children), os.cpu_count() or 1),
            done=note_end,
            on_finding=note_finding,
        )
        # Not between parts that run at the same time: the others' processes are on the GPU.
        if any(self.results.verdict(child.name) == FAILED for child in children):
            wait_for_gpu()


def list_parts(results: Results, parts: list[list[Part]]) -> str:
    """Returns a line for each part."""
    rows = []
    for part in [part for group in parts for part in group]:
        needs = (
            f"only if {part.if_failed} failed"
            if part.if_failed
            else f"{part.child.limit_s:.0f} s at most"
        )
        verdict = results.verdict(part.name) or "open"
        rows.append(f"{part.name:<22} {verdict:<9} {needs:<24} {part.shows}")
    return "\n".join(rows)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Runs the open parts and returns the exit status."""
    deadline = time.monotonic() + arguments.budget
    state = arguments.state.resolve()
    results = Results(state, arguments.out.resolve(), small=arguments.rehearse)
    logs = state / "parts"
    logs.mkdir(exist_ok=True)
    check = Check(interpret=arguments.rehearse, directory=logs)
    parts = list(groups(check, state))
    if arguments.list:
        print(list_parts(results, parts))
        return 0
    slot = Slot(check, results, parts, screen)
    only = tuple(text.strip() for text in arguments.only.split(",") if text.strip())
    if not any(slot.open_parts(only, True)):
        print(f"no part's name holds {arguments.only!r}; see --list", file=sys.stderr)
        return 2
    expected = slot.open_parts(only, arguments.again)
    if absent := missing():
        screen.say(absent)
    if reason := slot.probe(deadline):
        screen.end(reason)
        return 2
    status = slot.run(expected, deadline)
    left = [part for group in slot.open_parts(only, False) for part in group if not part.if_failed]
    still = [part.name for part in left]
    if results.problem or (arguments.rehearse and not all(part.may_lack for part in left)):
        screen.say(results.problem)
        status = 1
    verdicts = [each for each in results.findings if each.check.startswith("part ")]
    screen.end(
        f"{count_findings(verdicts)} of the parts; open: {', '.join(still) or 'nothing'}. {results.out / RESULTS}"
    )
    return status


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns the exit status."""
    arguments = parse(argv)
    if arguments.wheels:
        print(wheels())
        return 0
    if arguments.step == "record":
        try:
            print(record(arguments.results or arguments.state / RESULTS, arguments.document))
        except ValueError as refusal:
            sys.exit(str(refusal))
        return 0
    # No part may outlive the run and keep the GPU.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return run(arguments, Screen())


if __name__ == "__main__":
    sys.exit(main())
