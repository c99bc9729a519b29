"""Times cut-offs of draws, and steps that mask, bias and penalise: `python tools/bench_sampler.py --help`."""

from jaxpage.bench.sampling import main

if __name__ == "__main__":
    main()
