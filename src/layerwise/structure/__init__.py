"""The structure of layers' Hessians: Wu (2023), chapter 4 and appendix C.

>>> import torch, layerwise as lw
>>> net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
>>> batch = torch.rand(30, 4), torch.randint(3, (30,))
>>> H, K = lw.structure.layer_hessian(net, batch, "0"), lw.structure.decoupled(net, batch, "0")
>>> share = lw.structure.overlap(H.eigenpairs(2).vectors, K.eigenpairs(2).vectors)
>>> bool(share > 0.5)
True
"""

from typing import TYPE_CHECKING

from layerwise.foundations.lazy_names import import_when_used

if TYPE_CHECKING:
    from layerwise.structure.clusters import Clusters as Clusters
    from layerwise.structure.clusters import logit_gradient_clusters as logit_gradient_clusters
    from layerwise.structure.decoupling import DecouplingError as DecouplingError
    from layerwise.structure.decoupling import decoupling_error as decoupling_error
    from layerwise.structure.decoupling import relative_error as relative_error
    from layerwise.structure.eigenpairs import Eigenpairs as Eigenpairs
    from layerwise.structure.factors import Decoupled as Decoupled
    from layerwise.structure.factors import decoupled as decoupled
    from layerwise.structure.factors import input_mean as input_mean
    from layerwise.structure.factors import input_moment as input_moment
    from layerwise.structure.factors import output_hessian as output_hessian
    from layerwise.structure.hessian import layer_hessian as layer_hessian
    from layerwise.structure.network import FullNetwork as FullNetwork
    from layerwise.structure.network import full_network as full_network
    from layerwise.structure.operator import LayerOperator as LayerOperator
    from layerwise.structure.spectra import MeanAlignment as MeanAlignment
    from layerwise.structure.spectra import Outliers as Outliers
    from layerwise.structure.spectra import mean_alignment as mean_alignment
    from layerwise.structure.spectra import outliers as outliers
    from layerwise.structure.subspaces import correspondence as correspondence
    from layerwise.structure.subspaces import matricization as matricization
    from layerwise.structure.subspaces import overlap as overlap
    from layerwise.structure.subspaces import overlap_curve as overlap_curve
    from layerwise.structure.subspaces import random_overlap as random_overlap
    from layerwise.structure.subspaces import rank_one_ness as rank_one_ness

import_when_used(__name__)
