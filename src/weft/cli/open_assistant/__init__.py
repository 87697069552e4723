"""Compatibility with Open-Assistant: its config keys, and the arguments of its scripts."""
