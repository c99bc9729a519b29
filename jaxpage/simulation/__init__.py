"""Drives the engine's scheduler with a cost model in place of a device.

A run says what a schedule costs in virtual time, and what the scheduler costs in host time.
"""
