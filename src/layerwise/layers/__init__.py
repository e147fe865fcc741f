"""Layers: the only level that knows ``nn.Module`` types.

A `LayerRule` puts one layer type in standard form, a `LayerTable` decides which parameters get which form, a
`Tape` records inputs and pulls back output gradients, and `LayerIO` holds both for one layer.
"""
