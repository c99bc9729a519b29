"""Measures the scheduler without a device.

It measures the host time, the pool under pressure, and the pool at saturation.
"""
