"""One step: stacks of equal layers, damping, when decompositions are refreshed, and how the parameters are updated."""
