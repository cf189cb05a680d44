"""The step, and the loop around it."""
