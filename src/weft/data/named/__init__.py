"""Public datasets that a user selects by name, such as `webgpt`.

A catalogue entry (`entries/*.yaml`) says where a dataset comes from and which reader (`readers/`)
converts its rows.
"""

from weft.data.named.catalogue import CatalogueEntry, find_entry, list_names

__all__ = ["CatalogueEntry", "find_entry", "list_names"]
