"""The weights a run starts from: the hub, a folder, another run, an adapter; tuning recipes."""
