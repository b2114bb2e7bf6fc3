"""Decode attention on joint coefficients taken before rotation, all tokens at one rank: :mod:`.triton` on a GPU,
:mod:`.reference` in fp64."""
