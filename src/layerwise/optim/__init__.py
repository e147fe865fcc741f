"""Optimizers: ``W ← W − η P⁻ᵖ ∇L Q⁻ᑫ``, one engine and its members."""

from typing import TYPE_CHECKING

from layerwise.foundations.lazy_names import import_when_used

if TYPE_CHECKING:
    from layerwise.optim.ekfac import EKFAC as EKFAC
    from layerwise.optim.engine import Layerwise as Layerwise
    from layerwise.optim.foof import FOOF as FOOF
    from layerwise.optim.foof import LocoProp as LocoProp
    from layerwise.optim.kfac import KFAC as KFAC
    from layerwise.optim.muon import MahalanobisSpectral as MahalanobisSpectral
    from layerwise.optim.muon import Muon as Muon
    from layerwise.optim.ngd import NGD as NGD
    from layerwise.optim.reference import SGD as SGD
    from layerwise.optim.reference import Adam as Adam
    from layerwise.optim.reference import Sign as Sign
    from layerwise.optim.rule import UpdateRule as UpdateRule
    from layerwise.optim.shampoo import SOAP as SOAP
    from layerwise.optim.shampoo import Shampoo as Shampoo
    from layerwise.optim.supernat import SuperNat as SuperNat

import_when_used(__name__)
