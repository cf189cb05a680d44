"""Puzzles: solvers, generators and the symmetries that leave a puzzle a puzzle, many at once."""
