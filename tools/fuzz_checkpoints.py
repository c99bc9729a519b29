"""Compares random checkpoints of all families with transformers: settings, fields left out, files.

    python tools/fuzz_checkpoints.py --minutes 3 --seed 1 --family qwen3

The first difference is shrunk to the fewest changed fields and printed as a program; the exit
status is 1 then. What transformers runs and jaxpage refuses is counted by the text of the error.
Needs torch and the test packages (`pip install '.[test]'` on Python 3.11).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.fuzz_engine import fuzz_parser, prepare_jax, print_seed
from tools.needed import need


def main() -> int:
    """Runs the fuzzer and returns the exit status."""
    parser = fuzz_parser(__doc__)
    parser.add_argument(
        "--family",
        metavar="NAME",
        help="a module of jaxpage.models, such as qwen3, or an architecture; default: all",
    )
    arguments = parser.parse_args()
    need("pytest", "torch", "transformers", extra="test")
    seed = print_seed(parser, arguments)
    with tempfile.TemporaryDirectory(prefix="jaxpage-fuzz-cache-") as cache:
        prepare_jax(Path(cache), optimized=False)
        from tests.support.checkpoint_cases import bases
        from tests.support.checkpoint_fuzzing import fuzz

        if not bases(arguments.family):
            parser.error(f"--family {arguments.family}: no config of the tests is of this family")
        return fuzz(
            arguments.minutes,
            seed,
            family=arguments.family,
            report=lambda text: print(text, flush=True),
        )


if __name__ == "__main__":
    sys.exit(main())
