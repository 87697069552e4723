"""Imported last by the fork server: the collector of its children then looks at what they made, not at all imported modules.

A collection among 600,000 objects takes half a second, and writes to each of them, so that a child would copy their memory.
"""

import gc

gc.collect()
gc.freeze()
