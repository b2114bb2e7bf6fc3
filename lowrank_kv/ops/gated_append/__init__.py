"""One token of each sequence into a paged store, at its gate's rank: :mod:`.triton` on a GPU, :mod:`.reference` in fp64."""
