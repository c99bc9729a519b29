"""The tests of `tools/lab/`, and of studies that `jaxpage bench` runs: by `.ci/nightly`, not by
`pytest` without a path.
"""
