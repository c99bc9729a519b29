"""Lets several hosts serve one model together.

Each host has a process with the same engine. Rank 0 answers the requests, and tells the others what
happens to its engine, so that all run the same steps:

    clients ─▶ rank 0 ──┬─ arrival, abort, plan, ... ─▶ rank 1     each follower does the same,
               (server) └─ arrival, abort, plan, ... ─▶ rank 2     and compares its own records
"""
