"""Accelerators: selection, the catalogue of chips, and the sharding of arrays over a mesh."""
