"""Feature learning with layer-wise preconditioning (arXiv 2502.01763): linear representation learning.

>>> from layerwise import feature_learning as fl
>>> r = fl.simulate("kfac", scale="trace", lr=1.0, steps=30, seeds=2, dx=12, dy=5, k=3, batch=256)
>>> bool((r.dist[:, -1] < r.dist[:, 0]).all())
True
"""

from typing import TYPE_CHECKING

from layerwise.foundations.lazy_names import import_when_used

if TYPE_CHECKING:
    from layerwise.studies.feature_learning.algorithms import AMGD as AMGD
    from layerwise.studies.feature_learning.algorithms import DFW as DFW
    from layerwise.studies.feature_learning.algorithms import KFAC as KFAC
    from layerwise.studies.feature_learning.algorithms import SGD as SGD
    from layerwise.studies.feature_learning.algorithms import Adam as Adam
    from layerwise.studies.feature_learning.algorithms import Algorithm as Algorithm
    from layerwise.studies.feature_learning.algorithms import MinMin as MinMin
    from layerwise.studies.feature_learning.features import feature_distance as feature_distance
    from layerwise.studies.feature_learning.features import gradient_outer_product as gradient_outer_product
    from layerwise.studies.feature_learning.further import EKFAC as EKFAC
    from layerwise.studies.feature_learning.further import FOOF as FOOF
    from layerwise.studies.feature_learning.further import LocoProp as LocoProp
    from layerwise.studies.feature_learning.further import MahalanobisSpectral as MahalanobisSpectral
    from layerwise.studies.feature_learning.further import Shampoo as Shampoo
    from layerwise.studies.feature_learning.further import Sign as Sign
    from layerwise.studies.feature_learning.further import Spectral as Spectral
    from layerwise.studies.feature_learning.measures import rows_off as rows_off
    from layerwise.studies.feature_learning.measures import subspace_distance as subspace_distance
    from layerwise.studies.feature_learning.measures import whitened_distance as whitened_distance
    from layerwise.studies.feature_learning.measures import whitened_representation as whitened_representation
    from layerwise.studies.feature_learning.members import Member as Member
    from layerwise.studies.feature_learning.members import members as members
    from layerwise.studies.feature_learning.networks import learn as learn
    from layerwise.studies.feature_learning.ngd import NGD as NGD
    from layerwise.studies.feature_learning.one_step import correlations as correlations
    from layerwise.studies.feature_learning.one_step import expand_features as expand_features
    from layerwise.studies.feature_learning.one_step import predicted_correlations as predicted_correlations
    from layerwise.studies.feature_learning.one_step import predicted_sizes as predicted_sizes
    from layerwise.studies.feature_learning.one_step import rank_one as rank_one
    from layerwise.studies.feature_learning.one_step import refit as refit
    from layerwise.studies.feature_learning.problem import Setting as Setting
    from layerwise.studies.feature_learning.seeds import draws_of as draws_of
    from layerwise.studies.feature_learning.simulate import ALGORITHMS as ALGORITHMS
    from layerwise.studies.feature_learning.simulate import Result as Result
    from layerwise.studies.feature_learning.simulate import compare as compare
    from layerwise.studies.feature_learning.simulate import simulate as simulate
    from layerwise.studies.feature_learning.single_index import SingleIndex as SingleIndex
    from layerwise.studies.feature_learning.teacher import Network as Network

import_when_used(__name__)
