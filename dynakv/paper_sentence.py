"""The sentence of which the DynaKV paper shows what its tokens keep (section 5.1, Figures 4 and 5)."""

SENTENCE = (
    "I keep telling myself that I am going to start working on it tomorrow, but to be honest, I am just struggling with "
    "chronic procrastination."
)
# What the paper calls stopwords and rare words there.
STOPWORDS, RARE = ("that", "to", "be", "just"), ("chronic", "procrastination")
