"""One file a layer type: how it is put in standard form."""
