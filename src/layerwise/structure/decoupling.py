"""How far a layer's Hessian is from its Kronecker approximation (Wu 2023, conjecture (4.3))."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.likelihoods import Likelihood
from layerwise.foundations.linalg import Estimate, frobenius_squared
from layerwise.foundations.random import stream
from layerwise.layers.capture.model_call import in_own_arithmetic
from layerwise.structure.eigenpairs import DENSE, WHOLE, spectral_norm
from layerwise.structure.factors import Decoupled, Sharing, gather
from layerwise.structure.hessian import layer_hessian
from layerwise.structure.one_layer import one_layer
from layerwise.structure.operator import LayerOperator


@dataclass(frozen=True)
class DecouplingError:
    """``‖Ĥ − H‖ / ‖H‖``, and how well it is known."""

    spectral: float
    frobenius: float
    spectral_uncertainty: float
    """How far the ratio may be off, by the residuals of Lanczos; 0 for up to 1000 entries."""
    frobenius_uncertainty: float
    """0 where the matrices were formed, otherwise the standard error of the estimate."""

    @property
    def exact(self) -> bool:
        """Whether both matrices were formed."""
        return self.frobenius_uncertainty == 0


@in_own_arithmetic
def decoupling_error(
    model: nn.Module,
    data: Any,
    layer: str,
    likelihood: str | Likelihood = "categorical",
    *,
    gauss_newton: bool | None = None,
    bias: bool = False,
    sharing: Sharing = "expand",
    samples: int = 64,
    tol: float = 1e-4,
    max_steps: int = 200,
    seed: int = 0,
    **options: Any,
) -> DecouplingError:
    """The relative error of ``Ĥ = E[M] ⊗ E[x xᵀ]``, in spectral and Frobenius norm.

    Both matrices are formed for weights of up to 3000 entries. For larger ones the spectral norms come from Lanczos and
    the Frobenius norms from `samples` random vectors, each with the uncertainty that is stated.

    >>> import torch, layerwise as lw
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    >>> error = lw.structure.decoupling_error(net, (torch.rand(20, 4), torch.randint(3, (20,))), "0")
    >>> 0 < error.spectral < 1, error.exact
    (True, True)

    Args:
        model: as for `layer_hessian`.
        data: gone over twice.
        layer: as for `layer_hessian`.
        likelihood: as for `layer_hessian`.
        gauss_newton: which matrix H is, as for `layer_hessian`.
        bias: whether the bias takes part.
        sharing: of positions, as for `decoupled`.
        samples: random vectors for the Frobenius norms.
        tol: at which Lanczos stops, relative to the norm.
        max_steps: at which Lanczos stops at the latest.
        seed: of random vectors; and of a random forward.
        options: as for `layer_hessian`.
    """
    chosen = one_layer(model, data, layer, likelihood, bias=bias, seed=seed, **options)
    chosen.sweep.source.require_passes(2, "the Hessian and its factors")
    approximation = gather(chosen, sharing)
    hessian = layer_hessian(model, data, layer, likelihood, gauss_newton=gauss_newton, bias=bias, seed=seed, **options)
    return relative_error(hessian, approximation, samples=samples, tol=tol, max_steps=max_steps, seed=seed)


def relative_error(
    hessian: LayerOperator,
    approximation: Decoupled,
    *,
    samples: int = 64,
    tol: float = 1e-4,
    max_steps: int = 200,
    seed: int = 0,
) -> DecouplingError:
    """The error of an approximation that is at hand, for those who have both."""
    if hessian.matrix_shape != approximation.matrix_shape:
        raise InputError(
            describe(
                f"a Hessian of a {hessian.matrix_shape} weight and factors of a {approximation.matrix_shape} one",
                "the same layer, with or without its bias",
                "pass bias= to both",
            )
        )
    d = hessian.numel()
    if d <= DENSE:
        H = hessian.dense()
        E = approximation.dense().to(H) - H
        frobenius = _over(*(torch.linalg.matrix_norm(X) for X in (E, H)))
        if d <= WHOLE:
            return DecouplingError(_over(*(torch.linalg.eigvalsh(X).abs().max() for X in (E, H))), frobenius, 0.0, 0.0)
        of_E, of_H = (spectral_norm(X.matmul, d, H[0, 0], 1e-8, 2 * max_steps, seed) for X in (E, H))
        spectral, uncertain = _ratio(of_E, of_H)
        return DecouplingError(spectral, frobenius, uncertain, 0.0)

    def difference(X: Tensor) -> Tensor:
        return approximation @ X - hessian._times(X)

    like = torch.zeros((), dtype=hessian.dtype, device=hessian.device)
    of_E, of_H = (spectral_norm(m, d, like, tol, max_steps, seed) for m in (difference, hessian._times))
    squares = [
        frobenius_squared(m, d, samples, stream(seed, "frobenius"), like.dtype, like.device, chunk=16)
        for m in (difference, hessian._times)
    ]
    frobenius = _over(*squares) ** 0.5
    (spectral, uncertain), relative = _ratio(of_E, of_H), sum(_relative(s) ** 2 for s in squares) ** 0.5
    return DecouplingError(spectral, frobenius, uncertain, frobenius / 2 * relative)


def _ratio(of_E: tuple[float, float], of_H: tuple[float, float]) -> tuple[float, float]:
    """Of two norms that are known within their residuals, and how well it is known itself."""
    found = _over(of_E[0], of_H[0])
    return found, (of_E[1] + found * of_H[1]) / of_H[0]


def _over(a: Tensor | float, b: Tensor | float) -> float:
    if float(b) == 0:
        raise InputError(
            describe("a layer whose Hessian is zero", "a Hessian with a norm above 0", "check the layer and the data")
        )
    return float(a) / float(b)


def _relative(square: Estimate) -> float:
    return square.standard_error / max(float(square), 1e-300)
