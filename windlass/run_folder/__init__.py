"""The folder of a run: its files, its lock, its plan beside what was measured; other runs."""
