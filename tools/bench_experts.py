"""Times a mixture of experts by how many there are: `python tools/bench_experts.py --help`."""

from jaxpage.bench.experts import main

if __name__ == "__main__":
    main()
