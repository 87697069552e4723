"""Families of Hugging Face checkpoints, one module each."""
