"""Reading, tokenizing, mixing and batching of datasets."""
