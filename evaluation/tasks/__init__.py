"""Benchmarks of long prompts, answered through any cache.

A task is a list of items; an item has a context and a question about it (`item.py`). A method's cache reads the
context as a prompt and compresses it, then answers (`reader.py`). Where the question comes after the context the
compression is query-agnostic: the cache cannot know what it will be asked. Where it is a part of the prompt the
compression is query-aware.

`ruler/` generates RULER's 13 tasks, `longbench/` reads LongBench's 21 data sets, `choices.py` has multiple choice
with few shots, `lookup.py` key-value lookup, `boxed.py` problems whose answer is a boxed integer, and
`long_decoding.py` compares caches over thousands of generated tokens. `registry.py` makes tasks of their names,
`run.py` measures every method on each.
"""
