"""Statistics of layers: hooks on the model's forward and backward, sums over a batch, the scale of the loss."""
