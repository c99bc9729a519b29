"""The tests of jaxpage, one file per room of the house; what several of them need is in
`tests.support`. `.ci/nightly` runs `tests.lab`.
"""
