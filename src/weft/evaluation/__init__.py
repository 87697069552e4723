"""Looking at models from outside a run: open them, sample, score, compare."""
