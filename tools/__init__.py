"""Holds programs around the engine: `python tools/NAME.py`, where jaxpage is installed.

They run from any directory.
"""
