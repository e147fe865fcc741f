"""The features of a network of any depth: the directions of the input on which its outputs depend.

They are the leading eigenvectors of the average gradient outer product E[JᵀJ], J = ∂f/∂x.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.foundations.modes import evaluating
from layerwise.studies.feature_learning.measures import subspace_distance


def gradient_outer_product(model: nn.Module, x: Float[Tensor, "n dx"]) -> Float[Tensor, "dx dx"]:
    """The mean over x of JᵀJ, J = ∂f/∂x, with the model in eval mode.

    An optimizer that records what a model sees in training does not see this: x may be test inputs.

    >>> layer = nn.Linear(3, 2, bias=False)
    >>> torch.allclose(gradient_outer_product(layer, torch.randn(5, 3)), layer.weight.mT @ layer.weight, atol=1e-6)
    True
    """
    x = x.detach().requires_grad_()
    with torch.enable_grad(), evaluating(model):
        f = model(x)
        rows = [torch.autograd.grad(f[:, j].sum(), x, retain_graph=j + 1 < f.shape[1])[0] for j in range(f.shape[1])]
    return sum((row.mT @ row for row in rows), torch.zeros((), dtype=x.dtype)) / len(x)


def feature_distance(model: nn.Module, x: Float[Tensor, "n dx"], G: Float[Tensor, "k dx"]) -> float:
    """The sine of the largest angle between the top k eigenvectors of E[JᵀJ] and the rows of G⋆; 1 if not finite.

    >>> layer = nn.Linear(3, 1, bias=False)
    >>> x, weight = torch.randn(5, 3), layer.weight.detach()
    >>> feature_distance(layer, x, weight / weight.norm()) < 1e-3
    True
    """
    M = gradient_outer_product(model, x)
    if not M.isfinite().all():
        return 1.0
    return float(subspace_distance(torch.linalg.eigh(M)[1][:, -len(G) :].mT, G))
