"""Reallocation of parameters between layouts.

The module `plan` chooses which rank sends which piece, `traffic` counts the bytes, `buckets` groups
pieces into messages, and `link` and `messages` exchange them. `execute` does all of this in one
call.
"""
