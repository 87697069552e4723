"""Evaluation of models outside a run: open, sample, score, compare."""
