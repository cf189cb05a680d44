"""Multiscale attention: a sequence at several scales, attention to each, and their sum."""
