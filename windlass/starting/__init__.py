"""The weights a run starts from: the hub, a folder, another run, an adapter; and a recipe for tuning them."""
