"""Reallocation of parameters between layouts.

`plan` chooses which rank sends which piece, `traffic` counts the bytes, `buckets` groups pieces
into messages, `link` and `messages` exchange them, and `execute` runs all of it in one call.
"""
