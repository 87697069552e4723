"""Generation of completions with continuous batching."""
