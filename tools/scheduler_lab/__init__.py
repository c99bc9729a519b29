"""Measures the scheduler without a device: its host time, the pool under pressure, the pool at saturation."""
