"""Entry points with ReaL's module names: `python -m weft.apps.main` and `.quickstart`."""
