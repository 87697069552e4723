"""Command line of weft: one module per command, and what they share."""
