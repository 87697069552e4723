"""Shapes are checked in here: every function of `weft.algorithms` is type-checked when it is
called.
"""

from jaxtyping import install_import_hook

HOOK = install_import_hook("weft.algorithms", "beartype.beartype")
