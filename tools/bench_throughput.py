"""Runs `jaxpage bench throughput` as a script: `python tools/bench_throughput.py --help`."""

import sys

from jaxpage.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "throughput", *sys.argv[1:]]))
