"""The compressed cache and its layers: ragged and paged ones, and a base for layers with a state for each sequence."""
