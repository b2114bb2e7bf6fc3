"""lm-evaluation-harness with compressed caches; `model.py` is the model it asks, `command.py` its command line with
that model."""
