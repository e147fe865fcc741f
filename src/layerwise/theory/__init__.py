"""Theory of feature learning as functions to call, each formula with its number, corrected.

Formulas of arXiv 2502.01763, the quadratic model of lazy and feature learning of George (2023), section 5.4, and
Hessians of random networks and of two models of Wu (2023), sections 4.4 and C.7.

>>> from layerwise import theory
>>> round(theory.stieltjes([1.0], ratio=0.5, ridge=1.0).m, 6)
0.561553
"""

from typing import TYPE_CHECKING

from layerwise.foundations.lazy_names import import_when_used

if TYPE_CHECKING:
    from layerwise.theory.initial_hessian import active_probability as active_probability
    from layerwise.theory.initial_hessian import deep_output_hessian as deep_output_hessian
    from layerwise.theory.initial_hessian import initial_output_hessian as initial_output_hessian
    from layerwise.theory.initial_hessian import mean_squared_probability as mean_squared_probability
    from layerwise.theory.initial_hessian import printed_initial_output_hessian as printed_initial_output_hessian
    from layerwise.theory.initial_hessian import printed_overlap as printed_overlap
    from layerwise.theory.initial_hessian import rectified_gaussian as rectified_gaussian
    from layerwise.theory.initial_hessian import rectified_input_spectrum as rectified_input_spectrum
    from layerwise.theory.learned_step import converged_error as converged_error
    from layerwise.theory.learned_step import descent_error as descent_error
    from layerwise.theory.learned_step import log_gradient_bound as log_gradient_bound
    from layerwise.theory.learned_step import log_gradient_floor as log_gradient_floor
    from layerwise.theory.learned_step import naive_gradient_bound as naive_gradient_bound
    from layerwise.theory.learned_step import naive_gradient_floor as naive_gradient_floor
    from layerwise.theory.learned_step import spectrum_edges as spectrum_edges
    from layerwise.theory.learned_step import training_step as training_step
    from layerwise.theory.learned_step import validation_step as validation_step
    from layerwise.theory.linear_representation import Contraction as Contraction
    from layerwise.theory.linear_representation import LowerBoundProblem as LowerBoundProblem
    from layerwise.theory.linear_representation import TransferBound as TransferBound
    from layerwise.theory.linear_representation import kfac_contraction as kfac_contraction
    from layerwise.theory.linear_representation import lower_bound_problem as lower_bound_problem
    from layerwise.theory.linear_representation import sgd_lower_bound as sgd_lower_bound
    from layerwise.theory.linear_representation import sgd_population_step as sgd_population_step
    from layerwise.theory.linear_representation import sgd_scalar_step as sgd_scalar_step
    from layerwise.theory.linear_representation import sgd_stability_limit as sgd_stability_limit
    from layerwise.theory.linear_representation import subspace_distance as subspace_distance
    from layerwise.theory.linear_representation import transfer_bound as transfer_bound
    from layerwise.theory.log_linear import DownstreamTransfer as DownstreamTransfer
    from layerwise.theory.log_linear import LogLinear as LogLinear
    from layerwise.theory.log_linear import hidden_word_divergence as hidden_word_divergence
    from layerwise.theory.log_linear import hide_word as hide_word
    from layerwise.theory.log_linear import printed_hidden_word_divergence as printed_hidden_word_divergence
    from layerwise.theory.log_linear import relu_task as relu_task
    from layerwise.theory.log_linear import shift_logits as shift_logits
    from layerwise.theory.log_linear import silencing_shift as silencing_shift
    from layerwise.theory.log_linear import word_distance as word_distance
    from layerwise.theory.log_linear import word_divergence as word_divergence
    from layerwise.theory.norms import mahalanobis_descent as mahalanobis_descent
    from layerwise.theory.norms import mahalanobis_norm as mahalanobis_norm
    from layerwise.theory.norms import preconditioned_descent as preconditioned_descent
    from layerwise.theory.norms import preconditioned_dual_norm as preconditioned_dual_norm
    from layerwise.theory.norms import preconditioned_norm as preconditioned_norm
    from layerwise.theory.norms import printed_descent as printed_descent
    from layerwise.theory.norms import printed_norm as printed_norm
    from layerwise.theory.quadratic_model import QuadraticModel as QuadraticModel
    from layerwise.theory.quadratic_model import label_noise as label_noise
    from layerwise.theory.quadratic_model import order_reversal as order_reversal
    from layerwise.theory.quadratic_model import quadratic_model as quadratic_model
    from layerwise.theory.quadratic_model import spurious_feature as spurious_feature
    from layerwise.theory.random_matrices import marchenko_pastur as marchenko_pastur
    from layerwise.theory.random_matrices import resolvent as resolvent
    from layerwise.theory.random_matrices import stieltjes as stieltjes
    from layerwise.theory.sample_complexity import best_damping as best_damping
    from layerwise.theory.sample_complexity import correlation_limit as correlation_limit
    from layerwise.theory.sample_complexity import samples_needed as samples_needed
    from layerwise.theory.shared_eigenspaces import is_led_by_one_input as is_led_by_one_input
    from layerwise.theory.shared_eigenspaces import shared_overlap as shared_overlap
    from layerwise.theory.single_index import HermiteConstants as HermiteConstants
    from layerwise.theory.single_index import correlation_kfac as correlation_kfac
    from layerwise.theory.single_index import correlation_sgd as correlation_sgd
    from layerwise.theory.single_index import gaussian_mean as gaussian_mean
    from layerwise.theory.single_index import hermite_coefficient as hermite_coefficient
    from layerwise.theory.single_index import hermite_constants as hermite_constants
    from layerwise.theory.single_index import rank_one_coefficient as rank_one_coefficient
    from layerwise.theory.single_index import single_index_correlation as single_index_correlation
    from layerwise.theory.single_index import two_level_correlations as two_level_correlations
    from layerwise.theory.single_index import two_level_spectrum as two_level_spectrum

import_when_used(__name__)
