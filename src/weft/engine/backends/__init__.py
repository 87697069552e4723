"""Backends that build engines; the option `backend` of a role names one of them."""
