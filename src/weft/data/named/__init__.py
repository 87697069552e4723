"""Named datasets: catalogue entries (`entries/*.yaml`), readers of rows (`readers/`), and files."""

from weft.data.named.catalogue import find_entry, list_names
from weft.data.named.entry import CatalogueEntry

__all__ = ["CatalogueEntry", "find_entry", "list_names"]
