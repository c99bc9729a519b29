"""Declares and checks everything that users set: the engine, sampling, speculation.

The modules also read settings from files, variables and flags. None of them imports jax.
"""
