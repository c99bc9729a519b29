"""Runs one part of the GPU check: `python -m tools.lab.kernel_lab parity --backend triton`.

tools/lab/gpu_check.py runs them all.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from tools.lab.kernel_lab.findings import append
from tools.lab.kernel_lab.parts import PARTS, Options


def main(argv: list[str] | None = None) -> None:
    """Reads the command line and runs the part."""
    parser = argparse.ArgumentParser(prog="python -m tools.lab.kernel_lab", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument(
        "--backend", default="", help="for parity, stability, sanitizer, one-case and bench"
    )
    parser.add_argument(
        "--specs",
        default="short",
        help="texts of names, comma-separated, for bench; default: short",
    )
    parser.add_argument(
        "--splits", default="", help="numbers of splits to try, comma-separated, for bench"
    )
    parser.add_argument(
        "--interpret",
        action="store_true",
        help="on CPU: kernels are interpreted, everything is small",
    )
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="for parts that can be cut short; default: 120"
    )
    parser.add_argument("--directory", type=Path, help="where other parts left their findings")
    parser.add_argument(
        "--to",
        type=Path,
        help="file to which findings are appended, a line of JSON each; default: standard output",
    )
    parsed = parser.parse_args(argv)
    options = Options(
        backend=parsed.backend,
        specs=parsed.specs,
        splits=tuple(int(splits) for splits in parsed.splits.split(",") if splits),
        interpret=parsed.interpret,
        seconds=parsed.seconds,
        directory=parsed.directory,
    )
    for finding in PARTS[parsed.part](options):
        if parsed.to:
            append(parsed.to, finding)
        else:
            print(json.dumps(asdict(finding)), flush=True)


if __name__ == "__main__":
    main()
