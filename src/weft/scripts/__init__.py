"""Commands of older programs by their module names."""
