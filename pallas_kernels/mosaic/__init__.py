"""Holds the Mosaic GPU kernels, for Hopper (sm_90a)."""
