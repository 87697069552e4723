"""Readers of named datasets.

A reader is a function `reader(rows, use, *, option=..)` that converts rows in one format to
instances of `Example`.
"""
