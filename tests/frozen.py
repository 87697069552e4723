"""Imported last by the fork server: what runs look up by name, and then the collector is told to
leave all of it alone.

A collection among 600,000 objects takes half a second, and writes to each of them, so that a child
would copy their memory.
"""

import gc

from weft import registry

for each in (registry.families, registry.functions, registry.interfaces):
    each.load_all()
gc.collect()
gc.freeze()
