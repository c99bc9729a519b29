"""Compares random engines and requests with a plain engine that computes one request at a time.

    python tools/fuzz_engine.py --minutes 3 --seed 1

The first difference is shrunk to the fewest settings and requests and printed as a program; the
exit status is 1 then. Needs the test packages (`pip install '.[test]'`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.needed import need

# The tolerance of log probabilities where code is not optimized: it rounds otherwise in other
# shapes.
TOLERANCE = 1e-4


def main() -> int:
    """Runs the fuzzer and returns the exit status."""
    parser = fuzz_parser(__doc__)
    parser.add_argument(
        "--optimized",
        action="store_true",
        help="compile as for users, which takes five times as long, and compare log probabilities to the last bit",
    )
    parser.add_argument(
        "--models", nargs="+", default=(), metavar="NAME", help="models to try; default: all"
    )
    arguments = parser.parse_args()
    need("pytest", "hypothesis", extra="test")
    seed = print_seed(parser, arguments)
    with tempfile.TemporaryDirectory(prefix="jaxpage-fuzz-cache-") as cache:
        prepare_jax(Path(cache), arguments.optimized)
        from tests.support.executables import SharedExecutables
        from tests.support.fuzzing import fuzz

        tolerance = 0.0 if arguments.optimized else TOLERANCE
        with SharedExecutables().in_use(optimized=arguments.optimized):
            return fuzz(
                arguments.minutes,
                seed,
                tolerance=tolerance,
                report=lambda text: print(text, flush=True),
                models=arguments.models,
            )


@contextlib.contextmanager
def run_cases() -> Iterator[Callable[[Any], str]]:
    """Yields a function that returns what is wrong with a case; "" if nothing is.

    The programs that the fuzzer prints use it. Import `tests.support` after it is open.
    """
    need("pytest", "hypothesis", extra="test")
    with tempfile.TemporaryDirectory(prefix="jaxpage-fuzz-cache-") as cache:
        prepare_jax(Path(cache), optimized=False)
        from tests.support.executables import SharedExecutables
        from tests.support.fuzzing import Fuzzer

        with SharedExecutables().in_use(optimized=False):
            yield Fuzzer(Path(cache), tolerance=TOLERANCE).failure


def fuzz_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the flags that both fuzzers have, `--minutes` and `--seed`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=3.0, metavar="N", help="time for new cases; default: 3"
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="seed of the cases; default: a new one, which is printed",
    )
    return parser


def print_seed(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Checks `--minutes`, and returns the seed of the cases, which it prints."""
    if arguments.minutes <= 0:
        parser.error(f"--minutes must be above 0, got {arguments.minutes:g}")
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    return seed


def prepare_jax(cache: Path, optimized: bool) -> None:
    """Sets what JAX and jaxpage read when they are first imported.

    These are two CPU devices, a cache, and flags for fast compilation.
    """
    flags = "--xla_force_host_platform_device_count=2"
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAXPAGE_CACHE_DIR": str(cache), "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache / "xla"))
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"
    if not optimized:
        # Importing the flags imports jax, which reads them only when it makes its first device.
        from tests.support.executables import UNOPTIMIZED_FLAGS

        os.environ["XLA_FLAGS"] += f" {UNOPTIMIZED_FLAGS}"


if __name__ == "__main__":
    sys.exit(main())
