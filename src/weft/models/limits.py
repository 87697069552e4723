"""How large the sizes in a config.json may be; what lies beyond is taken for a mistake."""

from __future__ import annotations

MOST = 2**31  # a size is below this
LAYERS = ("num_hidden_layers", "n_layer")
MOST_LAYERS = 2**14
MOST_EXPERTS = 2**14
MOST_WEIGHTS = 1e14
