"""Kernels for CPUs in C++: sources, and the library that is compiled of them."""
