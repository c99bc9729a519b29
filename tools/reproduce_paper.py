"""Measures figures of the PagedAttention paper on an engine: `python tools/reproduce_paper.py --help`."""

from jaxpage.bench.sharing import main

if __name__ == "__main__":
    main()
