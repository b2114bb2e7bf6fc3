"""Where compression puts its bytes: what the figures of a report show of the methods of a comparison.

`shares.py` says what each token takes in each layer, `spectra.py` where the energy of states lies, `residuals.py` how far
bases are from the text while it is decoded. `measure.py` puts them together.
"""
