"""What is run on a real GPU: parity with float64, bitwise stability, timings beside measured ceilings, and the tuner.

The programs are tools/bench_kernels.py and tools/gpu_check.py; both run in miniature on a CPU.
"""
