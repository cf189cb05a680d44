"""Quantisers: levels and their gradients, blocks of GGUF, and fits on the host in NumPy."""
