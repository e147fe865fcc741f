"""Linear algebra on one matrix or one operator: no networks, no layers, no global state.

Matrices are ``[..., n, n]``; an operator is a callable on blocks of columns ``[d, B]``; every random draw
comes from a generator that the caller passes.
"""

from layerwise.foundations.linalg.checks import MatMul as MatMul
from layerwise.foundations.linalg.checks import finite_matrices as finite_matrices
from layerwise.foundations.linalg.draws import gaussian as gaussian
from layerwise.foundations.linalg.draws import rademacher as rademacher
from layerwise.foundations.linalg.eigh import guarded_cholesky as guarded_cholesky
from layerwise.foundations.linalg.eigh import guarded_eigh as guarded_eigh
from layerwise.foundations.linalg.eigh import guarded_inverse as guarded_inverse
from layerwise.foundations.linalg.eigh import null_tolerance as null_tolerance
from layerwise.foundations.linalg.eigh import settled_eigh as settled_eigh
from layerwise.foundations.linalg.eigh import symmetrized as symmetrized
from layerwise.foundations.linalg.estimate import Estimate as Estimate
from layerwise.foundations.linalg.krylov import CGResult as CGResult
from layerwise.foundations.linalg.krylov import conjugate_gradient as conjugate_gradient
from layerwise.foundations.linalg.krylov import lanczos as lanczos
from layerwise.foundations.linalg.krylov import lanczos_function as lanczos_function
from layerwise.foundations.linalg.lanczos_top import lanczos_top as lanczos_top
from layerwise.foundations.linalg.norms import norm as norm
from layerwise.foundations.linalg.norms import squared_norm as squared_norm
from layerwise.foundations.linalg.stochastic import frobenius_squared as frobenius_squared
from layerwise.foundations.linalg.stochastic import hutchinson_diagonal as hutchinson_diagonal
from layerwise.foundations.linalg.stochastic import hutchinson_trace as hutchinson_trace
from layerwise.foundations.linalg.stochastic import slq_logdet as slq_logdet
from layerwise.foundations.linalg.symmetric_product import accumulate_gram as accumulate_gram
from layerwise.foundations.linalg.symmetric_product import cross_product as cross_product
from layerwise.foundations.linalg.symmetric_product import gram as gram
from layerwise.foundations.linalg.symmetric_product import mirror_ as mirror_
