"""Readers of named datasets: functions `reader(rows, use, *, option=..)` that make examples of rows
of one shape.
"""
