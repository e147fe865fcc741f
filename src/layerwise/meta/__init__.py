"""Learning to learn the step size: Wu (2023), chapter 5 and appendix D, corrected.

>>> import torch, layerwise as lw
>>> problem = lw.meta.Quadratic.of(torch.diag(torch.tensor([0.1, 1.0, 2.0])), torch.ones(3))
>>> round(float(problem.best_step(40)), 3)  # of 40 steps of gradient descent
0.921
>>> bool(problem.gradient(10.0, 400).isfinite())  # where f(w_t) is 1e1023
True
"""

from typing import TYPE_CHECKING

from layerwise.foundations.lazy_names import import_when_used

if TYPE_CHECKING:
    from layerwise.meta.learn import Episode as Episode
    from layerwise.meta.learn import Learned as Learned
    from layerwise.meta.learn import learn as learn
    from layerwise.meta.least_squares import Descent as Descent
    from layerwise.meta.least_squares import LearnedStep as LearnedStep
    from layerwise.meta.least_squares import LeastSquares as LeastSquares
    from layerwise.meta.mlp_optimizer import MLPOptimizer as MLPOptimizer
    from layerwise.meta.mlp_optimizer import mlp_memory as mlp_memory
    from layerwise.meta.mlp_optimizer import mlp_parameters as mlp_parameters
    from layerwise.meta.mlp_optimizer import mlp_update as mlp_update
    from layerwise.meta.quadratic import Quadratic as Quadratic
    from layerwise.meta.unroll import Fault as Fault
    from layerwise.meta.unroll import Unrolled as Unrolled
    from layerwise.meta.unroll import functional as functional
    from layerwise.meta.unroll import inner_step as inner_step
    from layerwise.meta.unroll import sgd as sgd
    from layerwise.meta.unroll import unrolled as unrolled

import_when_used(__name__)
