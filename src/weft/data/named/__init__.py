"""Named datasets: entries (`entries/*.yaml`), row readers (`readers/`), and their files."""

from weft.data.named.catalogue import find, names
from weft.data.named.entry import Entry

__all__ = ["Entry", "find", "names"]
