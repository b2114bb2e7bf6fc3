"""The falsification suite of "Low-Rank KV Cache Subspaces in Decoding" (SubSpace): is what each head caches of low rank?

`settings.py` lists what is measured, `ranks.py` makes the caches, `suite.py` runs, and `verdicts.py` says of H0 and of each
claim of the paper whether the figures refute it, by rules that stand there.
"""
