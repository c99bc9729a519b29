"""Holds the kernels of Pallas' Triton backend.

They compute attention, products and selection, write keys and values, and move blocks.
"""
