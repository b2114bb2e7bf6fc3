"""The packages whose objects caches hold: a new method's own package joins them (docs/adding-a-method.md)."""

# Of these, bytes are counted and classes are read back from a file of a cache; what others hold is left out.
METHOD_PACKAGES = ("lowrank_kv.", "ojakv.", "dynakv.")
