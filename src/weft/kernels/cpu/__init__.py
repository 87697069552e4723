"""CPU kernels in C++ that torch lacks; the installed compiler builds them at the first use."""
