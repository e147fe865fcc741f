"""Studies: one folder a line of work, each with its problems, algorithms and measures."""
