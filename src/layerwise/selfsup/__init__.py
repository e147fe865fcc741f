"""Self-supervised representations: masked sparse coding and anchor vectors, Wu (2023), chapters 2 and 3, corrected."""

from layerwise.foundations.lazy_names import import_when_used

import_when_used(__name__)
