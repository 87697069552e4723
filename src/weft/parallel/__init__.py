"""Splitting of a network over several ranks, without changes to the modules of the network."""
