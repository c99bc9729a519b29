"""Holds the kernels for CPUs in C++: the sources, and the library that is compiled from them."""
