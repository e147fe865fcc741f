"""Bounds on generalization, and measures of complexity: George (2023), section 6.4 and appendix B.2, corrected; and
PAC-Bayes bounds from the structure of Hessians, Wu (2023), section 4.6 and appendix C.8, corrected.

>>> import torch, layerwise as lw
>>> K = torch.eye(50)
>>> round(lw.bounds.rademacher_bound(K, radius=2.0), 4)
0.2828
"""

from typing import TYPE_CHECKING

from layerwise.foundations.lazy_names import import_when_used

if TYPE_CHECKING:
    from layerwise.bounds.flow import FlowComplexity as FlowComplexity
    from layerwise.bounds.kl import binary_kl as binary_kl
    from layerwise.bounds.kl import kl_inverse as kl_inverse
    from layerwise.bounds.margins import binary_contraction as binary_contraction
    from layerwise.bounds.margins import generalization_bound as generalization_bound
    from layerwise.bounds.margins import margin_loss as margin_loss
    from layerwise.bounds.margins import margin_percentile as margin_percentile
    from layerwise.bounds.margins import margins as margins
    from layerwise.bounds.margins import multiclass_contraction as multiclass_contraction
    from layerwise.bounds.margins import ramp as ramp
    from layerwise.bounds.measures import bartlett2017 as bartlett2017
    from layerwise.bounds.measures import displacement_trace as displacement_trace
    from layerwise.bounds.measures import fisher_rao as fisher_rao
    from layerwise.bounds.measures import frobenius_product as frobenius_product
    from layerwise.bounds.measures import measures as measures
    from layerwise.bounds.measures import neyshabur2019 as neyshabur2019
    from layerwise.bounds.measures import one_inf_product as one_inf_product
    from layerwise.bounds.measures import parameter_count as parameter_count
    from layerwise.bounds.measures import spectral_frobenius as spectral_frobenius
    from layerwise.bounds.pac_bayes.monte_carlo import error_limit as error_limit
    from layerwise.bounds.pac_bayes.optimize import pac_bayes as pac_bayes
    from layerwise.bounds.pac_bayes.prior import PriorGrid as PriorGrid
    from layerwise.bounds.pac_bayes.prior import relative_entropy_rate as relative_entropy_rate
    from layerwise.bounds.pac_bayes.result import PacBayes as PacBayes
    from layerwise.bounds.rademacher import Estimate as Estimate
    from layerwise.bounds.rademacher import flow_rademacher as flow_rademacher
    from layerwise.bounds.rademacher import flow_rademacher_bound as flow_rademacher_bound
    from layerwise.bounds.rademacher import multiclass_bound as multiclass_bound
    from layerwise.bounds.rademacher import rademacher as rademacher
    from layerwise.bounds.rademacher import rademacher_bound as rademacher_bound
    from layerwise.bounds.rademacher import rescaled_kernel as rescaled_kernel
    from layerwise.bounds.rescaling import Rescaling as Rescaling
    from layerwise.bounds.rescaling import optimal_rescaling as optimal_rescaling

import_when_used(__name__)
