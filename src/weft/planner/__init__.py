"""Estimates of a run's time and memory, and the choice of its devices: pure functions without torch.

The facts that they are given are gathered by `weft.launch` and `weft.experiments`.
"""
