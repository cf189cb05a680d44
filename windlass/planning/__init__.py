"""Questions about a run that are answered before it: what a chip that is not here makes of it."""
