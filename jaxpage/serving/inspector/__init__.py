"""Serves the inspector page: a playground, and a view of an engine's KV blocks, queue and steps.

The view shows a running engine or a recorded event log.
"""
