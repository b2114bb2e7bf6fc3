"""One token of each sequence into a paged store, at the rank its gate gives it: :mod:`.triton` on a GPU, :mod:`.reference`."""
