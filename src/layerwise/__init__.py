"""layerwise."""
