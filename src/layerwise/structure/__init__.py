"""The structure of layers' Hessians: Wu (2023), chapter 4 and appendix C."""

from layerwise.foundations.lazy_names import import_when_used

import_when_used(__name__)
