"""Matrices on parameter space: Fisher, Gauss-Newton, Hessian and gradient second moments in any structure."""
