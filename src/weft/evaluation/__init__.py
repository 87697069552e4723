"""Evaluation of models outside a run: open models, sample answers, score and compare them."""
