"""Entry points with the module names of ReaL: `python -m weft.apps.main` and `.quickstart`."""
