"""Measuring what compression costs and saves."""
