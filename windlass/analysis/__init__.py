"""Reading programs: one table of primitives behind liveness, the cost model, FLOPs and the text of compiled programs."""
