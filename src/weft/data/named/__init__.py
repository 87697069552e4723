"""Public datasets that a user selects by name, such as `webgpt`.

A catalogue entry (`entries/*.yaml`) says where a dataset comes from and which reader (`readers/`)
converts its rows.
"""

from weft.data.named.catalogue import find_entry, list_names
from weft.data.named.entry import CatalogueEntry

__all__ = ["CatalogueEntry", "find_entry", "list_names"]
