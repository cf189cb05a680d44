"""Reading programs: FLOPs, memory traffic, collectives, live buffers at the peak."""
