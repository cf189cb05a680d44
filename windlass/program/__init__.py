"""The programs of a run: its abstract model, what of it is trained, the train step, init."""
