"""Import path of earlier versions; see `weft.cli.dialects`."""
