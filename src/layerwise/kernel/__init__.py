"""Kernel: function space. Jacobians, the tangent kernel, and what is measured on it."""
