"""Runs the engines of `tools/compare_engines.py`: `python -m tools.peers.NAME_peer`.

Each reads a `Task` on standard input.
"""
