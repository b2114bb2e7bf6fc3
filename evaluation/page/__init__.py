"""`report.html`: records of comparisons as one page that opens without a network, in light and dark, at any width.

`points.py` reads rows, `svg.py` draws, `fronts.py`, `bars.py`, `sentence.py` and `curves.py` are its figures, and `build.py`
puts them into `report.html.jinja`. `demo.py` adds what one prompt became to it, for `make demo`.
"""
