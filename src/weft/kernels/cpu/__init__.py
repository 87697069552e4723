"""CPU kernels in C++, which the installed compiler builds at the first use."""
