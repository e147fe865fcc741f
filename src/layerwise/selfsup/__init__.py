"""Self-supervised representations: masked sparse coding and anchor vectors, Wu (2023), chapters 2 and 3, corrected.

>>> import layerwise as lw
>>> data = lw.selfsup.sample_sparse_data(d=20, p=30, k=3, n=200, sigma=0.05)
>>> code = lw.selfsup.omp(data.Y, data.A, 3)
>>> code.values.shape
torch.Size([200, 3])
"""

from typing import TYPE_CHECKING

from layerwise.foundations.lazy_names import import_when_used

if TYPE_CHECKING:
    from layerwise.selfsup.anchors.log_partition import log_bulk_partition as log_bulk_partition
    from layerwise.selfsup.anchors.measure import anchors as anchors
    from layerwise.selfsup.anchors.measure import anchors_of as anchors_of
    from layerwise.selfsup.anchors.report import AnchorReport as AnchorReport
    from layerwise.selfsup.sparse_coding.data import SparseData as SparseData
    from layerwise.selfsup.sparse_coding.data import sample_sparse_data as sample_sparse_data
    from layerwise.selfsup.sparse_coding.data import start_dictionary as start_dictionary
    from layerwise.selfsup.sparse_coding.guarantees import incoherence as incoherence
    from layerwise.selfsup.sparse_coding.guarantees import largest_chi_square as largest_chi_square
    from layerwise.selfsup.sparse_coding.guarantees import least_coefficient as least_coefficient
    from layerwise.selfsup.sparse_coding.guarantees import missed_support as missed_support
    from layerwise.selfsup.sparse_coding.guarantees import oracle_prediction as oracle_prediction
    from layerwise.selfsup.sparse_coding.learner import DictionaryLearner as DictionaryLearner
    from layerwise.selfsup.sparse_coding.losses import heldout_masked_loss as heldout_masked_loss
    from layerwise.selfsup.sparse_coding.losses import masked_omp_loss as masked_omp_loss
    from layerwise.selfsup.sparse_coding.losses import reconstruction_loss as reconstruction_loss
    from layerwise.selfsup.sparse_coding.omp import SparseCode as SparseCode
    from layerwise.selfsup.sparse_coding.omp import omp as omp
    from layerwise.selfsup.sparse_coding.overfitting import exhaustive_loss as exhaustive_loss
    from layerwise.selfsup.sparse_coding.overfitting import pair_dictionary as pair_dictionary
    from layerwise.selfsup.sparse_coding.recovery import recovery_error as recovery_error
    from layerwise.selfsup.sparse_coding.training import train_dictionaries as train_dictionaries

import_when_used(__name__)
