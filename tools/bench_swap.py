"""Times swapping a sequence's KV blocks to host memory and back against computing them again: `python tools/bench_swap.py --help`."""

from jaxpage.bench.swapping import main

if __name__ == "__main__":
    main()
