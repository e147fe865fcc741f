"""Several processes: who owns which factor, and how statistics become those of all ranks together."""
