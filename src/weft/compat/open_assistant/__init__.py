"""Compatibility with Open-Assistant: its config keys and its scripts' arguments."""
