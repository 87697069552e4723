"""Command line of weft: one module per command, and modules that several commands use."""
