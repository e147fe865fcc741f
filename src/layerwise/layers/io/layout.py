"""`Layout` is beside `LayerCall`, which has one; this name is for modules that import it from here."""

from layerwise.layers.io.layer_io import Layout as Layout
