"""Holds programs around the engine: `python tools/NAME.py`, where jaxpage is installed.

They run from any directory. Their parts, and studies, are in `tools/lab/`.
"""
