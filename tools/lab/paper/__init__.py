"""Draws the figures of the PagedAttention paper with the engine's scheduler and block manager.

The program is `tools/reproduce_paper.py`.
"""
