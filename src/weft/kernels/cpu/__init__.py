"""The kernels of a CPU that torch lacks, in C++: compiled by the machine's own compiler when they
are first needed.
"""
