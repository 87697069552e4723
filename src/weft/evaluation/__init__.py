"""Evaluation of models outside a run: sampling, scoring and comparison of answers."""
