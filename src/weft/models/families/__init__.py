"""Families of Hugging Face checkpoints, with one module per family."""
