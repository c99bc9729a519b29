"""Runs steps on the device: pages, step functions, buckets, and the table of executables.

Nothing in this room sees a request.
"""
