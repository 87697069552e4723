"""Commands of older programs, under their module names."""
