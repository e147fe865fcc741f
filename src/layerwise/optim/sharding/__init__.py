"""Sharded parameters (`fully_shard`): each layer has one rank that owns its factors, decompositions and moments."""
