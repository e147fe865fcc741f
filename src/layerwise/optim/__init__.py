"""Optimizers: ``W ← W − η P⁻ᵖ ∇L Q⁻ᑫ``, one engine and its members."""

from typing import TYPE_CHECKING

from layerwise.foundations.lazy_names import import_when_used

if TYPE_CHECKING:
    from layerwise.optim.engine import Layerwise as Layerwise
    from layerwise.optim.members.adam import Adam as Adam
    from layerwise.optim.members.ekfac import EKFAC as EKFAC
    from layerwise.optim.members.foof import FOOF as FOOF
    from layerwise.optim.members.kfac import KFAC as KFAC
    from layerwise.optim.members.locoprop import LocoProp as LocoProp
    from layerwise.optim.members.mahalanobis import MahalanobisSpectral as MahalanobisSpectral
    from layerwise.optim.members.muon import Muon as Muon
    from layerwise.optim.members.ngd import NGD as NGD
    from layerwise.optim.members.sgd import SGD as SGD
    from layerwise.optim.members.shampoo import Shampoo as Shampoo
    from layerwise.optim.members.sign import Sign as Sign
    from layerwise.optim.members.soap import SOAP as SOAP
    from layerwise.optim.members.supernat import SuperNat as SuperNat
    from layerwise.optim.options import Execution as Execution
    from layerwise.optim.options import Refresh as Refresh
    from layerwise.optim.options import Statistics as Statistics
    from layerwise.optim.rule import UpdateRule as UpdateRule

import_when_used(__name__)
