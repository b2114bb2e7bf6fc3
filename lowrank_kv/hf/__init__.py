"""All contact with transformers.

`geometry` finds a model's attention modules and `rope` rotates and un-rotates with the family's own function. `attention` is
the attention function of compressed models, `compiled_ops` its form in a compiled model; `prepare` installs them. `cache`
holds the compressed caches that `generate()` drives, and `default_cache` says which cache a model fills and which it
refuses. `loading` turns a hub id or directory into a model.
"""
