"""Writes keys and values and moves blocks, in plain XLA: the definitions."""
