"""Writes keys and values, moves blocks and multiplies in plain XLA: these are the definitions."""
