"""Triton kernels and the functions that launch them.

Kernels are the functions ``*_kernel`` of the files ``*_kernels.py``, which are imported at their first use and marked
by ``@_jit`` in place of `triton.jit`, so that they can be imported without Triton.
"""
