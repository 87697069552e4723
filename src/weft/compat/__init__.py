"""Translation of other programs: option names, configuration files, scripts, model stores.

weft works without this package. It refers to it only through the table in `weft.cli.dialects`.
"""
