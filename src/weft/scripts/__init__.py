"""Replacements for scripts of other programs, under the same module names."""
