"""Readers of named datasets.

A reader is a function `reader(rows, use, *, option=..)` that makes examples of rows of one
shape.
"""
