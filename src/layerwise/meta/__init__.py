"""Learning to learn the step size: Wu (2023), chapter 5 and appendix D, corrected."""

from layerwise.foundations.lazy_names import import_when_used

import_when_used(__name__)
