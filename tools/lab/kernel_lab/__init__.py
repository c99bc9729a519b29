"""Holds what runs on a real GPU: parity, bitwise stability, timings and the tuner.

Parity compares each kernel with float64; timings are reported next to measured ceilings. The
programs are tools/bench_kernels.py and tools/lab/gpu_check.py; both run in miniature on a CPU.
"""
