"""Continued pre-training of DynaKV compressors."""
