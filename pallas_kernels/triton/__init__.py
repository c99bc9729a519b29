"""Kernels through Pallas' Triton backend: attention, writing keys and values, moving blocks."""
