"""Containers of one layer's coefficients: growing, quantized, ragged (a CPU's) and paged (a GPU's), and bytes by kind."""
