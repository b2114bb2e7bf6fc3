"""Decode attention on per-head coefficients taken after rotation: :mod:`.triton` on a GPU, :mod:`.reference` in fp64."""
