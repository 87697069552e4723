"""Families of Hugging Face checkpoints, with one module per family.

The package also defines upper limits of the sizes in a config.json; larger values are treated as
mistakes.
"""

from __future__ import annotations

MOST = 2**31  # all sizes are below this
LAYERS = ("num_hidden_layers", "n_layer")
MOST_LAYERS = 2**14
MOST_EXPERTS = 2**14
MOST_WEIGHTS = 1e14
