"""Engines that `tools/compare_engines.py` runs: `python -m tools.peers.NAME_peer`, with a `Task` on standard input."""
