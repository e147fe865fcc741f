"""The command line: `layerwise list`, `run`, `report` and `check`."""
