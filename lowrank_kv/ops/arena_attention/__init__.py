"""Decode attention over a server's pages (`lowrank_kv/stores/arena.py`): :mod:`.triton` on a GPU, :mod:`.reference` in
fp64. :mod:`.page_reader` has the calls of the form that is compiled for CPUs, `lowrank_kv/ops/native/pages.py`."""
