"""Verifiers: reward functions that are registered by name."""
