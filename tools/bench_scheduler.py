"""The scheduler on a cost model and against the clock, without a device: `python tools/bench_scheduler.py --help`."""

import sys

from jaxpage.simulation.benchmark import main

if __name__ == "__main__":
    sys.exit(main())
