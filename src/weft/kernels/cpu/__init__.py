"""CPU kernels that torch lacks, in C++; the machine's own compiler builds them at the first use."""
