"""The processes of a run: joining, signals, collective decisions, and what becomes of one that fails."""
