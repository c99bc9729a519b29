"""Provides the layers, in Flax NNX, that model families are built from.

They see a flat stream of tokens, never a request.
"""
