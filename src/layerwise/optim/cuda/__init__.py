"""Everything that makes steps fast on a GPU: storage, inverses and bases by products, CUDA graphs, deferred work.

Nothing outside this folder imports Triton, and no member imports this folder: a member asks its `Backend`.
"""
