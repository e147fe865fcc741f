"""The geometry of a network, layer by layer.

>>> import torch, layerwise as lw
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
>>> x, y = torch.randn(32, 4), torch.randint(3, (32,))
>>> F = lw.fisher(model, (x, y), structure="ekfac", estimator="exact")
>>> float(F.trace()) > 0
True
"""

from typing import TYPE_CHECKING

from layerwise.foundations.lazy_names import import_when_used

if TYPE_CHECKING:
    from layerwise import bounds as bounds
    from layerwise import meta as meta
    from layerwise import optim as optim
    from layerwise import regimes as regimes
    from layerwise import selfsup as selfsup
    from layerwise import structure as structure
    from layerwise import theory as theory
    from layerwise.curvature.build import fisher as fisher
    from layerwise.curvature.build import ggn as ggn
    from layerwise.curvature.build import gradient_moment as gradient_moment
    from layerwise.curvature.build import hessian as hessian
    from layerwise.curvature.matrix import ParamMatrix as ParamMatrix
    from layerwise.curvature.storage import load as load
    from layerwise.doctor.examination import doctor as doctor
    from layerwise.foundations import likelihoods as likelihoods
    from layerwise.foundations.errors import LayerwiseError as LayerwiseError
    from layerwise.foundations.vectors import ParamVector as ParamVector
    from layerwise.kernel.alignment import alignment as alignment
    from layerwise.kernel.alignment import cka as cka
    from layerwise.kernel.alignment import effective_rank as effective_rank
    from layerwise.kernel.alignment import spectrum as spectrum
    from layerwise.kernel.alignment import trace_ratio as trace_ratio
    from layerwise.kernel.jacobian import Jacobian as Jacobian
    from layerwise.kernel.jacobian import jacobian as jacobian
    from layerwise.kernel.kernel import Kernel as Kernel
    from layerwise.kernel.ntk import ntk as ntk
    from layerwise.layers.form import LayerRule as LayerRule
    from layerwise.layers.form import layer_rule as layer_rule
    from layerwise.layers.matrices import batched as batched
    from layerwise.layers.matrices import split as split
    from layerwise.layers.table import LayerTable as LayerTable
    from layerwise.layers.table import layers as layers
    from layerwise.regimes.linearized import linearized as linearized
    from layerwise.studies import feature_learning as feature_learning

import_when_used(__name__)

__version__ = "0.1.0"
