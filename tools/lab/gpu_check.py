"""Checks and measures the kernels on the GPU of this machine, in one command within ten minutes.

    python tools/lab/gpu_check.py --record docs/gpu-results.md

It compares every backend with float64, writing and copying of pages with XLA, the bits of a token
among other neighbours, and the engine's tokens with each backend; it runs compute-sanitizer, and
then measures times next to measured ceilings and contiguous attention. Each part runs in a process
of its own, so that a crash or a hang is one failed check. The kernels' parts need only jax, numpy
and jaxtyping; other packages that are missing are reported.

Exit status: 0 all that was checked passed, 1 something failed, 2 there is no GPU (then try
--interpret: a miniature on CPU). The last line of standard output is JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from pathlib import Path

# Lets the program run where only jaxpage is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pallas_kernels.sets import GPU_BACKENDS
from tools.lab.kernel_lab.check import Check, exit_status, has_gpu
from tools.lab.kernel_lab.findings import FAILED, Finding
from tools.lab.kernel_lab.record import append_section, as_data, count_findings, line, section
from tools.lab.progress import Bar

NO_GPU = "There is no GPU here, or JAX does not see it. --interpret runs a miniature on CPU."


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="what no longer fits is left out; default: 9"
    )
    parser.add_argument(
        "--record", type=Path, help="Markdown file that gets a section with the verdicts and tables"
    )
    parser.add_argument("--json", type=Path, help="file that also gets the JSON of the last line")
    parser.add_argument(
        "--backends", default=",".join(GPU_BACKENDS), help=f"default: {','.join(GPU_BACKENDS)}"
    )
    parser.add_argument(
        "--only",
        default="",
        help='parts by name, comma-separated: "parity triton,bench"; default: all',
    )
    parser.add_argument("--list", action="store_true", help="list the parts, and do nothing")
    parser.add_argument(
        "--jobs", type=int, default=4, help="parts side by side, where none is timed; default: 4"
    )
    parser.add_argument(
        "--interpret",
        action="store_true",
        help="a miniature on CPU: small shapes, kernels interpreted",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="for findings and logs of the parts; default: a new temporary one",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the checks and returns the exit status."""
    arguments = parse(argv)
    backends = tuple(arguments.backends.split(","))
    if unknown := set(backends) - set(GPU_BACKENDS):
        sys.exit(f"--backends: {', '.join(sorted(unknown))} not among {', '.join(GPU_BACKENDS)}")
    settings = {
        "minutes": arguments.minutes,
        "interpret": arguments.interpret,
        "backends": backends,
        "only": tuple(name.strip() for name in arguments.only.split(",") if name.strip()),
        "jobs": arguments.jobs,
    }
    if arguments.directory:
        arguments.directory.mkdir(parents=True, exist_ok=True)
        for old in arguments.directory.glob("*.jsonl"):
            old.unlink()
        settings["directory"] = arguments.directory.resolve()
    check = Check(**settings)
    children = check.children()
    if arguments.list or not children:
        print(
            "\n".join(child.name for child in children)
            or f"no part's name holds {arguments.only!r}; see --list"
        )
        return 0 if children else 1
    print(f"findings and logs: {check.directory}", flush=True)
    return report(check, arguments, run(check, len(children) + 1))


def run(check: Check, num_parts: int) -> list[Finding]:
    """Runs the parts of the check and shows their findings."""
    bar = Bar(num_parts, "part")

    def note_finding(finding: Finding) -> None:
        text = line(finding)
        if finding.status == FAILED:
            text += "".join(
                f"\n{finding.data[key]}" for key in ("traceback", "log") if key in finding.data
            )
        bar.write(text)

    try:
        return check.run(
            on_finding=note_finding, ended=lambda name, verdict: bar.step(f"{name}: {verdict}")
        )
    finally:
        bar.close()


def report(check: Check, arguments: argparse.Namespace, findings: list[Finding]) -> int:
    """Prints and writes the findings, and returns the exit status."""
    environment = next((dict(f.data) for f in findings if f.check == "environment" and f.data), {})
    status = exit_status(findings)
    if not check.interpret and not has_gpu(findings):
        print(NO_GPU, file=sys.stderr)
        status = 2
    for finding in findings:
        for table in finding.tables:
            print(f"\n{table.plain()}")
    print(f"\n{count_findings(findings)}")
    if arguments.record and status != 2:
        command = shlex.join(["python", "tools/lab/gpu_check.py", *sys.argv[1:]])
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        append_section(arguments.record, section(findings, environment, date=date, command=command))
        print(f"recorded in {arguments.record}")
    data = json.dumps({**as_data(findings, environment), "exit_status": status})
    if arguments.json:
        arguments.json.write_text(data + "\n", encoding="utf-8")
    print(data, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
