"""Workloads, measurement and reports: what `jaxpage bench` runs."""
