"""Weights to and from the files of others."""
