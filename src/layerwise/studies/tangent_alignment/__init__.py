"""Chapter 6 of George (2023): how tangent kernels align with the task, and what bounds follow."""
