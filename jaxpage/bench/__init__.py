"""Makes workloads, measures them and reports the results; `jaxpage bench` runs this package."""
