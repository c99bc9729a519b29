"""Runs the engines of `tools/compare_engines.py`: `python -m tools.lab.peers.NAME_peer`.

Each reads a `Task` on standard input.
"""
