"""Parallelism: splitting a network over several ranks without changing the network's modules."""
