"""Reallocation: moving a model's parameters from one parallel layout to another.

The module `plan` decides which rank sends which piece of each parameter, counts the bytes, and groups
the pieces into messages. `execute` carries out a plan by `messages`, which exchanges the messages.
"""
