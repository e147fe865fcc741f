"""Sparse coding with a learned dictionary: y ≈ B z, where z has few entries, and B may be larger than the truth."""
