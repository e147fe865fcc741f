"""The two factors of a layer's Hessian, and their Kronecker product: ``H ≈ E[M] ⊗ E[x xᵀ]`` (Wu 2023, section 4.2).

The sums are those of K-FAC (`layerwise.curvature.kronecker`), whose product ``G ⊗ A`` this is, exactly: ``G`` with all
output directions, ``A`` with or without the bias column. Where P positions share the weight (pixels, tokens), the
thesis puts the factor P at the inputs, (C.20–27):

    E[M̃] = 1/(N P) Σ_{n,s} M_ns = G / P,      E[X Xᵀ] = 1/N Σ_{n,s} x xᵀ = P A
"""

import heapq
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.curvature.approximation import Options
from layerwise.curvature.kronecker import KroneckerApproximation
from layerwise.foundations.arithmetic import OwnArithmetic
from layerwise.foundations.device import require
from layerwise.foundations.errors import InputError, UnsupportedError, describe, not_one_of
from layerwise.foundations.kronecker import InputFactor, Kronecker
from layerwise.foundations.likelihoods import Likelihood
from layerwise.foundations.linalg import guarded_eigh
from layerwise.layers.capture.model_call import in_own_arithmetic
from layerwise.layers.capture.recorder import RecordedBatch
from layerwise.layers.io.layer_io import LayerIO, RecordedIO
from layerwise.structure.eigenpairs import Eigenpairs, check_count
from layerwise.structure.one_layer import Observe, OneLayer, one_layer

Sharing = Literal["expand", "reduce"]


@dataclass(eq=False)
class Decoupled(OwnArithmetic):
    """``Ĥ = M ⊗ S``, its factors and their eigenbases; never formed unless asked for.

    A grouped layer has one pair of factors a group, and Ĥ is block diagonal.
    """

    output_factors: Float[Tensor, "K O O"]
    input_factors: Float[Tensor, "K I I"]
    input_means: Float[Tensor, "K I"]
    positions: float
    """P, the mean over examples."""

    @property
    def M(self) -> Float[Tensor, "..."]:
        """E[M], [m, m]; of a grouped layer [K, m/K, m/K]."""
        return _alone(self.output_factors)

    @property
    def S(self) -> Float[Tensor, "..."]:
        """E[x xᵀ], [n, n]; of a grouped layer [K, n, n]."""
        return _alone(self.input_factors)

    @property
    def mean(self) -> Float[Tensor, "..."]:
        """E[x], [n], over examples and positions; of a grouped layer [K, n]."""
        return _alone(self.input_means)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(m, n) of the layer's weight."""
        k, o, _ = self.output_factors.shape
        return k * o, self.input_factors.shape[-1]

    def numel(self) -> int:
        """mn."""
        m, n = self.matrix_shape
        return m * n

    @cached_property
    def operator(self) -> Kronecker:
        """As `lw.fisher` has it."""
        return Kronecker(InputFactor(self.input_factors), self.output_factors)

    @cached_property
    def output_eigh(self) -> tuple[Float[Tensor, "K O"], Float[Tensor, "K O O"]]:
        """τ, descending, and U: eigenvalues and eigenvectors (columns) of E[M]."""
        return _descending(self.output_factors, "output Hessian")

    @cached_property
    def input_eigh(self) -> tuple[Float[Tensor, "K I"], Float[Tensor, "K I I"]]:
        """γ, descending, and V: eigenvalues and eigenvectors (columns) of E[x xᵀ]."""
        return _descending(self.input_factors, "input moment")

    @property
    def U(self) -> Float[Tensor, "..."]:
        """Eigenvectors of E[M] as columns, the largest eigenvalue first."""
        return _alone(self.output_eigh[1])

    @property
    def V(self) -> Float[Tensor, "..."]:
        """Eigenvectors of E[x xᵀ] as columns, the largest eigenvalue first."""
        return _alone(self.input_eigh[1])

    def __matmul__(self, X: Tensor) -> Tensor:
        """``Ĥ X`` for a vector [mn], columns [mn, b] or a matrix [m, n]."""
        d, shape = self.numel(), (*self.output_factors.shape[:2], self.input_factors.shape[-1])
        if not (X.shape == self.matrix_shape or (X.ndim in (1, 2) and X.shape[0] == d)):
            raise InputError(
                describe(
                    f"a right-hand side of shape {tuple(X.shape)}",
                    f"[{d}], [{d}, b] or {list(self.matrix_shape)}",
                    "reshape it",
                )
            )
        columns = X.reshape(d, -1).mT.reshape(-1, *shape).to(self.output_factors)
        return self.operator.mv(columns).reshape(-1, d).mT.reshape(X.shape).to(X.dtype)

    def dense(self) -> Float[Tensor, "d d"]:
        """``kron(M, S)``; small layers only."""
        return self.operator.as_matrix()

    def trace(self) -> Float[Tensor, ""]:
        """``tr M · tr S``."""
        return self.operator.trace()

    def frobenius(self) -> Float[Tensor, ""]:
        """``‖M‖ ‖S‖``."""
        return self.operator.frobenius_squared().sqrt()

    def norm(self) -> Float[Tensor, ""]:
        """The spectral norm, ``τ_1 γ_1``."""
        return (self.output_eigh[0][:, 0] * self.input_eigh[0][:, 0]).max()

    def leading(self, k: int) -> list[tuple[int, int, int]]:
        """Which products of eigenvalues are the k largest: (group, place in U, place in V), by a heap."""
        check_count(k, self.numel())
        tau, gamma = self.output_eigh[0].tolist(), self.input_eigh[0].tolist()
        # Rows of products fall from left to right and columns from top to bottom: a row is begun when the one above is.
        heap = [(-tau[g][0] * gamma[g][0], g, 0, 0) for g in range(len(tau))]
        heapq.heapify(heap)
        found: list[tuple[int, int, int]] = []
        while len(found) < k:
            _, g, j, i = heapq.heappop(heap)
            found.append((g, j, i))
            if i + 1 < len(gamma[g]):
                heapq.heappush(heap, (-tau[g][j] * gamma[g][i + 1], g, j, i + 1))
            if i == 0 and j + 1 < len(tau[g]):
                heapq.heappush(heap, (-tau[g][j + 1] * gamma[g][0], g, j + 1, 0))
        return found

    def eigenvalues(self, k: int) -> Float[Tensor, "k"]:
        """The k largest, descending, without vectors."""
        g, j, i = torch.tensor(self.leading(k)).unbind(1)
        return self.output_eigh[0][g, j] * self.input_eigh[0][g, i]

    def eigenpairs(self, k: int) -> Eigenpairs:
        """The k largest eigenvalues ``τ_j γ_i``, their vectors ``u_j ⊗ v_i`` [mn, k], and the residuals."""
        g, j, i = torch.tensor(self.leading(k)).unbind(1)
        (tau, U), (gamma, V) = self.output_eigh, self.input_eigh
        values = tau[g, j] * gamma[g, i]
        groups, o, n = U.shape[0], U.shape[1], V.shape[1]
        vectors = U.new_zeros(k, groups, o, n)
        vectors[torch.arange(k), g] = torch.einsum("ko,ki->koi", U.mT[g, j], V.mT[g, i])
        columns = vectors.reshape(k, -1).mT
        residuals = torch.linalg.vector_norm(self @ columns - columns * values, dim=0)
        return Eigenpairs(values, columns, residuals)


def _alone(t: Tensor) -> Tensor:
    return t[0] if t.shape[0] == 1 else t


def _descending(M: Tensor, name: str) -> tuple[Tensor, Tensor]:
    values, vectors = guarded_eigh(M, name=name)
    return values.flip(-1), vectors.flip(-1)


def gather(layer: OneLayer, sharing: Sharing = "expand") -> Decoupled:
    """Both factors in one pass, by K-FAC's own sums.

    Inputs get a column of ones, whose moment with them is their mean.
    """
    if sharing not in ("expand", "reduce"):
        raise InputError(not_one_of("sharing", sharing, ("expand", "reduce")))
    sums: list[KroneckerApproximation] = []

    def begin() -> Observe:
        sums.clear()

        def observe(io: LayerIO, first: bool, recorded: RecordedBatch) -> None:
            layer.require_rule("Kronecker factors")
            spec = layer.spec
            if not spec.form.kronecker:
                raise UnsupportedError(
                    describe(
                        f"Kronecker factors of {spec.name!r} ({spec.kind})",
                        "a layer with a weight matrix",
                        "see lw.layers(model); layer_hessian works for it",
                    )
                )
            assert isinstance(io, RecordedIO)
            bordered = replace(spec, form=replace(spec.form, bias=spec.form.bias or spec.form.weight))
            spec = spec if spec.form.one_hot else bordered
            require(
                32 * spec.form.groups * (spec.form.inputs**2 + spec.form.outputs**2),
                layer.sweep.memory,
                f"factors of layer {spec.name!r} and their eigenvectors",
                "allow more with memory=",
            )
            if not sums:
                sums.append(KroneckerApproximation(spec, Options(sharing), torch.float64, layer.device))
            sums[0].observe(replace(io, spec=spec), first)

        return observe

    totals = layer.each(begin, "Kronecker factors")
    if not sums:
        raise InputError(
            describe(
                f"data on which layer {layer.spec.name!r} takes no part",
                "a layer that the output depends on",
                "check the model's forward",
            )
        )
    count = totals.scale(layer.sweep.normalize)
    A, G = sums[0].factors(count)
    positions = max(sums[0].rows, 1) / totals.examples
    if layer.spec.form.one_hot:
        return Decoupled(G / positions, A.dense() * positions, A.values, positions)
    inputs = A.values
    mean, kept = inputs[:, :-1, -1], inputs if layer.with_bias else inputs[:, :-1, :-1]
    if layer.with_bias:
        mean = inputs[:, :, -1]
    return Decoupled(G / positions, kept * positions, mean, positions)


@in_own_arithmetic
def decoupled(
    model: nn.Module,
    data: Any,
    layer: str,
    likelihood: str | Likelihood = "categorical",
    *,
    bias: bool = False,
    sharing: Sharing = "expand",
    **options: Any,
) -> Decoupled:
    """The Kronecker approximation ``Ĥ = E[M] ⊗ E[x xᵀ]`` of a layer's Hessian, (4.3).

    The same matrix as ``lw.fisher(model, data, structure="kfac", estimator="exact")`` has for the layer, on the weight
    alone unless `bias`.

    >>> import torch, layerwise as lw
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    >>> K = lw.structure.decoupled(net, (torch.randn(20, 4), torch.randint(3, (20,))), "0")
    >>> K.M.shape, K.S.shape, K.eigenpairs(2).vectors.shape
    (torch.Size([6, 6]), torch.Size([4, 4]), torch.Size([24, 2]))

    Args:
        model: as for `layer_hessian`; inputs and M are what the recorded network has, whatever its activations.
        data: gone over once.
        layer: as for `layer_hessian`.
        likelihood: as for `layer_hessian`.
        bias: whether the inputs get a last entry 1, for the bias.
        sharing: how positions that share the weight are treated: each for itself ("expand", (C.20–27)), or as the mean
            of inputs and the sum of gradients ("reduce").
        options: as for `layer_hessian`.
    """
    return gather(one_layer(model, data, layer, likelihood, bias=bias, **options), sharing)


def output_hessian(
    model: nn.Module, data: Any, layer: str, likelihood: str | Likelihood = "categorical", **options: Any
) -> Float[Tensor, "..."]:
    """``E[M] = E[Gᵀ A G]``, [m, m]: the Hessian of the mean loss in the layer's output; K-FAC's factor G.

    With P positions an example it is their mean, ``G / P``. Options as for `decoupled`.

    >>> import torch, layerwise as lw
    >>> net = torch.nn.Linear(4, 3)
    >>> M = lw.structure.output_hessian(net, (torch.randn(20, 4), torch.randint(3, (20,))), "Linear")
    >>> bool(M.sum(0).abs().max() < 1e-6)  # diag p − ppᵀ: adding to all logits changes nothing
    True
    """
    return decoupled(model, data, layer, likelihood, **options).M


def input_moment(
    model: nn.Module, data: Any, layer: str, likelihood: str | Likelihood = "categorical", **options: Any
) -> Float[Tensor, "..."]:
    """``S = E[x xᵀ]``, [n, n], not centred; K-FAC's factor A.

    With P positions an example it is their sum, ``E[X Xᵀ] = P A``. Options as for `decoupled`.

    >>> import torch, layerwise as lw
    >>> net, x = torch.nn.Linear(4, 3), torch.randn(20, 4)
    >>> S = lw.structure.input_moment(net, (x, torch.randint(3, (20,))), "Linear")
    >>> torch.allclose(S.float(), x.T @ x / 20, atol=1e-6)
    True
    """
    return decoupled(model, data, layer, likelihood, **options).S


def input_mean(
    model: nn.Module, data: Any, layer: str, likelihood: str | Likelihood = "categorical", **options: Any
) -> Float[Tensor, "..."]:
    """``E[x]``, [n], over examples and positions. Options as for `decoupled`.

    >>> import torch, layerwise as lw
    >>> net, x = torch.nn.Linear(4, 3), torch.randn(20, 4)
    >>> mean = lw.structure.input_mean(net, (x, torch.randint(3, (20,))), "Linear")
    >>> torch.allclose(mean.float(), x.mean(0), atol=1e-6)
    True
    """
    return decoupled(model, data, layer, likelihood, **options).mean
