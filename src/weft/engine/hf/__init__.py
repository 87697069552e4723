"""Any decoder of `transformers` as a network of the torch engine."""
