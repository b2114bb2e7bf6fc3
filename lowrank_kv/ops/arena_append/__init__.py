"""New tokens into the pages of :mod:`lowrank_kv.stores.arena`: :mod:`.triton` on a GPU; its plain form is
:func:`lowrank_kv.stores.arena.write_rows`, its compiled form :mod:`lowrank_kv.ops.native.pages`."""
