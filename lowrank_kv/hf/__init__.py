"""All contact with transformers.

`geometry` finds a model's attention modules, `rope` rotates and un-rotates with the family's own function, `attention`
registers the attention function and arms it, `cache` is the compressed cache `generate()` drives, and `loading` turns a
hub id or directory into a model.
"""
