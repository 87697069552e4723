"""Entry points under the module names of ReaL, such as `python -m weft.apps.main`."""
