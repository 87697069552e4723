"""Named datasets: entries (`entries/*.yaml`), row readers (`readers/`), and their files."""

from weft.data.named.catalogue import find_entry, list_names
from weft.data.named.entry import CatalogueEntry

__all__ = ["CatalogueEntry", "find_entry", "list_names"]
