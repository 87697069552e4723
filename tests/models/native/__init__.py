"""The C++ kernels of a CPU."""
