"""Datasets by name: what each is (`entries/*.yaml`), how its rows are read (`readers/`), and where
a copy of it lies.
"""

from weft.data.named.catalogue import find, names
from weft.data.named.entry import Entry

__all__ = ["Entry", "find", "names"]
