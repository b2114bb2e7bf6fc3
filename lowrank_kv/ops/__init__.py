"""Attention on coefficients and what belongs to it, an operation a folder.

In each, `reference` is a plain form in fp64, `eager` the torch form, `native` calls compiled C on a CPU and `triton` kernels
on a GPU, all with one signature; `native/` and `triton/` beside them hold what several operations' fast forms share.
"""
