"""Planning: memory, step time and cost of a run, on chips that need not be here."""
