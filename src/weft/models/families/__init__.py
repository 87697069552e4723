"""Families of Hugging Face checkpoints, with one module per family.

The package also defines upper limits of the sizes in a config.json; larger values are treated as
mistakes.
"""

from __future__ import annotations

SIZE_LIMIT = 2**31  # exclusive
LAYER_KEYS = ("num_hidden_layers", "n_layer")  # keys of the number of layers
MAX_LAYERS = 2**14
MAX_EXPERTS = 2**14
MAX_WEIGHTS = 1e14
