"""Choosing the accelerator, what it can do, and how arrays are laid out over several."""
