"""Holds what host and device modules exchange about a step.

These are requests, plans, results, edits, drafts and limits, made of integers and numpy arrays. It
is a vocabulary: every other room imports its modules.
"""
