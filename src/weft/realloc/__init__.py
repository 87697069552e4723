"""Reallocation: moving a model's parameters from one parallel layout to another.

The module `plan` decides which rank sends which piece of each parameter, and `traffic` counts the
bytes. To carry out a plan, `execute` uses `buckets`, which groups pieces into messages, and `link`
and `messages`, which exchange the messages.
"""
