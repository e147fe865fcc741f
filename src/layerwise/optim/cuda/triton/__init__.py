"""Triton kernels (`*_kernels.py`, imported at their first use) and the functions that launch them."""
