"""Adaptation of any decoder of `transformers` to the torch engine."""
