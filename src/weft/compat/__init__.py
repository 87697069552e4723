"""Support for option names, configuration files, scripts and model stores of other programs.

weft works without this package. It refers to it only through the table in `weft.cli.dialects`.
"""
