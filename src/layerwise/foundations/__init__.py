"""Ground floor: torch and the standard library only. Knows nothing of networks.

Vectors and operators on parameter space, likelihoods and cotangents at the model's output, guarded linear
algebra, errors, progress. Nothing here imports `layerwise.layers` or anything above it.
"""
