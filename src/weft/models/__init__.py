"""Language models: the decoder with its attention and caches, and Hugging Face families."""
