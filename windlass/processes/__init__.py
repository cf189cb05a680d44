"""The processes of a run: joining, signals, decisions of all, and what becomes of a lost one."""
