"""Helpers without a model: configuration, command lines, errors, files that appear whole, texts, and records of runs."""
