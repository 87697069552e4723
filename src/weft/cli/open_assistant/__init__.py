"""Open-Assistant's way of working on weft: the keys of its config files, and the arguments of its
commands.
"""
