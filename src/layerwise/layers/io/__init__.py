"""What was recorded of one layer: inputs and output gradients in standard form, and their second moments."""
