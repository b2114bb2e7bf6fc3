"""All contact with transformers.

- `geometry` reads the shape of a model's cache and finds its attention modules.
- `rope` and `rotary` apply and undo the family's own rotation.
- `attention` is the attention function of compressed models, `compiled_ops` its form in a compiled model, and `prepare`
  installs them over the model's own attention (`backends`).
- `cache` holds the compressed caches that `generate()` drives; `default_cache` says which cache a model fills and which it
  refuses.
- `loading` turns a hub id or directory into a model, `full_checkpoint` lets `from_pretrained` load compressed ones, and
  `compile_decoding` compiles decoding.
"""
