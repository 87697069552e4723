"""Backends that build engines, by the name that the option `backend` has."""
