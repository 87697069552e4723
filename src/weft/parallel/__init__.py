"""Ranks that hold parts of one network, joined from outside: the network's own modules know nothing
of it.
"""
