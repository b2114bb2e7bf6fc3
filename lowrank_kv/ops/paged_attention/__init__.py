"""Decode attention over paged stores: :mod:`.triton` on a GPU, :mod:`.reference` in fp64. Only the first needs Triton."""
