"""Tables, figures and single numbers of the documents, made from the runs under results/.

`published.py` reads which rows of which run are published, `tables.py` and `figures.py` make them into Markdown and
pictures, `documents.py` puts them between the markers of a document, `publish.py` does it all or checks that it is done.
"""
