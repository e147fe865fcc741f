"""`layer_hessian`: the Hessian of the loss in the weight of one layer, as an operator.

For piecewise-linear networks it is the Gauss–Newton matrix, ``H = E[M_x ⊗ x xᵀ]`` with ``M_x = Gᵀ A G``: outputs are
linear in the weight of a single layer (Wu 2023, (4.1), (C.6), (C.13)). With smooth activations the two differ.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.curvature.hessian import HessianProducts
from layerwise.foundations.arithmetic import OwnArithmetic
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.likelihoods import Likelihood
from layerwise.foundations.linalg import Estimate, frobenius_squared, hutchinson_trace, squared_norm
from layerwise.foundations.memory import require
from layerwise.foundations.random import stream
from layerwise.layers.calling import autocast_of_the_caller, in_own_arithmetic
from layerwise.layers.recorder import Batch
from layerwise.layers.source import Source
from layerwise.layers.standard import HALF
from layerwise.layers.vectorised import tolerance
from layerwise.structure.eigenpairs import DENSE, Eigenpairs, check_count, dense_pairs, lanczos_pairs
from layerwise.structure.one_layer import OneLayer, one_layer
from layerwise.structure.rows import Factored, Piece, Rows

GRAM = 6000
"""Up to so many rows, their Gram matrix is decomposed instead of a larger Hessian."""


class LayerOperator(OwnArithmetic, guard=in_own_arithmetic):
    """A symmetric matrix on the weight ``W [m, n]`` of one layer, in the order of ``W.flatten()``.

    Rows of W are outputs, as `Linear` and convolutions store it (`Embedding` stores the transpose). Where the bias
    takes part it is the last column.
    """

    layer: OneLayer
    dtype: torch.dtype
    name: str
    """Which matrix it is."""

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(m, n) of the layer's weight; outputs of all groups together."""
        k, o, i = self.layer.shape
        return k * o, i

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix itself, (mn, mn)."""
        d = self.numel()
        return d, d

    def numel(self) -> int:
        """mn."""
        m, n = self.matrix_shape
        return m * n

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return self.layer.device

    @abstractmethod
    def _times(self, X: Float[Tensor, "d b"]) -> Float[Tensor, "d b"]:
        """Product with a block of columns."""

    @abstractmethod
    def dense(self) -> Float[Tensor, "d d"]:
        """The matrix itself, in float64."""

    @abstractmethod
    def trace(self) -> Tensor:
        """Sum of the eigenvalues."""

    def __matmul__(self, X: Tensor) -> Tensor:
        """``H X`` for a vector [mn], columns [mn, b] or a matrix [m, n]."""
        d = self.numel()
        if not isinstance(X, Tensor) or not (X.shape == self.matrix_shape or (X.ndim in (1, 2) and X.shape[0] == d)):
            given = f"shape {tuple(X.shape)}" if isinstance(X, Tensor) else type(X).__name__
            raise InputError(
                describe(f"a right-hand side of {given}", f"[{d}], [{d}, b] or {list(self.matrix_shape)}", "reshape it")
            )
        return self._times(X.reshape(d, -1).to(self.device)).reshape(X.shape)

    def eigenpairs(
        self, k: int, *, method: str | None = None, tol: float = 1e-6, max_steps: int = 500, seed: int = 0
    ) -> Eigenpairs:
        """The k largest eigenvalues, descending, their vectors ``[mn, k]`` and residuals ``‖H h − λ h‖``.

        Args:
            k: how many.
            method: "dense" (float64), "gram" (through the Gram matrix of rows), "lanczos" (full reorthogonalisation),
                or None: the first that suits the sizes.
            tol: Lanczos stops when residuals are ``≤ tol λ_1``, or at the precision of the products.
            max_steps: Lanczos stops after so many products with blocks of 16 columns; residuals tell.
            seed: of Lanczos' first columns.
        """
        check_count(k, self.numel())
        method = method or self._method(k)
        if method == "dense":
            return dense_pairs(self.dense(), k)
        if method == "gram":
            return self._gram_pairs(k)
        if method != "lanczos":
            raise InputError(describe(f"method={method!r}", '"dense", "gram" or "lanczos"', "choose one of them"))
        options: dict[str, Any] = {"tol": tol, "max_steps": max_steps, "seed": seed}
        return lanczos_pairs(self._times, self.numel(), k, dtype=self.dtype, device=self.device, **options)

    def _method(self, k: int) -> str:
        return "dense" if self._fits_dense() else "lanczos"

    def _fits_dense(self) -> bool:
        return self.numel() <= DENSE and 16 * self.numel() ** 2 <= self.layer.sweep.memory

    def _gram_pairs(self, k: int) -> Eigenpairs:
        raise InputError(describe('method="gram" of a Hessian by autograd', '"dense" or "lanczos"', "choose one"))

    def frobenius(self, samples: int = 64, seed: int = 0) -> Tensor:
        """``‖H‖_F``: exact for up to 3000 entries, else an estimate with its standard error."""
        if self.numel() <= DENSE:
            return squared_norm(self.dense()).sqrt()
        found = frobenius_squared(
            self._times, self.numel(), samples, stream(seed, "frobenius"), self.dtype, self.device, chunk=16
        )
        return root(found)

    def norm(self) -> Float[Tensor, ""]:
        """The spectral norm of a positive semi-definite matrix: its largest eigenvalue."""
        return self.eigenpairs(1).values[0]

    def __repr__(self) -> str:
        m, n = self.matrix_shape
        return f"{self.name} of layer {self.layer.spec.name!r}, a {m} × {n} weight"


def root(square: Estimate) -> Estimate:
    """The square root of an estimate, its error by the slope."""
    value = float(square) ** 0.5
    error = square.standard_error / (2 * value) if value else 0.0
    return Estimate(torch.tensor(value, dtype=torch.float64), standard_error=error, samples=square.samples)


@dataclass(eq=False, repr=False)
class GaussNewton(LayerOperator):
    """``1/N Σ_n J_nᵀ A_n J_n`` restricted to one layer, from rows ``√A J``."""

    rows: Rows
    agreement: float | None = None
    """Largest relative difference to the Hessian on a few examples, where that was looked at."""

    @property
    def layer(self) -> OneLayer:  # type: ignore[override]
        """Its layer."""
        return self.rows.layer

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """What products are made in."""
        return self.rows.dtype

    @property
    def name(self) -> str:  # type: ignore[override]
        """Which matrix it is."""
        return "Gauss–Newton matrix" if self.agreement is None else "Hessian (= Gauss–Newton matrix)"

    @property
    def examples(self) -> int:
        """N."""
        return self.rows.examples

    @property
    def stored(self) -> bool:
        """Whether rows are kept; if not, every product goes over the data."""
        return self.rows.pieces is not None

    def _times(self, X: Float[Tensor, "d b"]) -> Float[Tensor, "d b"]:
        return self.rows.times(X)

    def trace(self) -> Float[Tensor, ""]:
        """Exact: squared norms of rows."""
        return torch.tensor(self.rows.square / self.rows.count, dtype=torch.float64)

    def dense(self) -> Float[Tensor, "d d"]:
        """The matrix itself, in float64."""
        d = self.numel()
        require(
            16 * d * d,
            self.layer.sweep.memory,
            f"the dense Hessian of {d} entries",
            "use products and eigenpairs, or allow more with memory=",
        )
        return self._dense.clone()

    @cached_property
    def _dense(self) -> Tensor:
        d = self.numel()
        total = torch.zeros(d, d, dtype=torch.float64, device=self.device)
        self.rows.each(lambda part: part.add_outer_(total), "dense")
        return total / self.rows.count

    def _method(self, k: int) -> str:
        if self._fits_dense():
            return "dense"
        return "gram" if k <= self.rows.total <= GRAM and self._pieces_for_gram() else "lanczos"

    def _pieces_for_gram(self) -> list[Piece] | None:
        """One piece whose Gram matrix has a closed form."""
        pieces = self.rows.pieces
        if pieces is None or len(pieces) != 1:
            return None
        only = pieces[0]
        return pieces if not isinstance(only, Factored) or only.positions == 1 else None

    def gram(self) -> Float[Tensor, "M M"]:
        """``F Fᵀ`` with ``H = Fᵀ F``: rows against rows, in float64; M = examples · cotangents."""
        pieces = self._pieces_for_gram()
        if pieces is None or self.rows.total > 4 * GRAM:
            raise InputError(
                describe(
                    f"the Gram matrix of {self.rows.total} rows",
                    f"up to {4 * GRAM} rows that are kept, of a layer with one position",
                    'use method="lanczos", or fewer examples',
                )
            )
        only = pieces[0]
        if isinstance(only, Factored) and isinstance(only.a, Tensor):
            n, v = only.examples, only.vectors
            k, o, i = only.shape
            a, g = only.a.reshape(n, k, i).double(), only.g.reshape(n * v, k, o).double()
            found = torch.zeros(n * v, n * v, dtype=torch.float64, device=a.device)
            for group in range(k):
                inputs = a[:, group] @ a[:, group].mT
                of_group = (g[:, group] @ g[:, group].mT).view(n, v, n, v)
                found += (of_group * inputs.view(n, 1, n, 1)).view(n * v, n * v)
        else:
            R = only.written().double()
            found = R @ R.mT
        return found / self.rows.count

    def _gram_pairs(self, k: int) -> Eigenpairs:
        values, vectors, _ = dense_pairs(self.gram(), min(k, self.rows.total))
        if k > len(values) or float(values[-1]) <= 1e-12 * float(values[0]):
            return self.eigenpairs(k, method="lanczos")  # some of them are in the null space, which rows do not span
        assert self.rows.pieces is not None
        only = self.rows.pieces[0]
        C = vectors.view(only.examples, only.vectors, k) / (values * self.rows.count).sqrt()
        H = only.pull(C.to(self.dtype)).reshape(self.numel(), k).double()
        H = H / torch.linalg.vector_norm(H, dim=0)
        residuals = torch.linalg.vector_norm(self._times(H) - H * values, dim=0)
        return Eigenpairs(values, H, residuals)


@dataclass(eq=False, repr=False)
class AutogradHessian(LayerOperator):
    """``∇²`` of the mean loss in one layer's weight, by differentiating the gradient."""

    layer: OneLayer  # type: ignore[assignment]
    products: HessianProducts
    name: str = field(default="Hessian", init=False)  # type: ignore[assignment]

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """What products are made in."""
        return self.layer.dtype

    def _times(self, X: Float[Tensor, "d b"]) -> Float[Tensor, "d b"]:
        return torch.cat([self._some(part) for part in X.split(32, dim=1)], dim=1)

    def _some(self, X: Float[Tensor, "d b"]) -> Float[Tensor, "d b"]:
        form, b = self.layer.spec.form, X.shape[1]
        blocks = X.mT.to(self.dtype).reshape(b, *self.layer.shape)
        if self.layer.spec.sites and form.bias is not None and not self.layer.bias:
            blocks = torch.nn.functional.pad(blocks, (0, 1))
        elif not self.layer.spec.sites:
            blocks = blocks.reshape(b, *form.shape)
        shapes = self.layer.sweep.recorder.table.shapes
        params = {
            name: X.new_zeros(b, *shapes[name], dtype=self.dtype) for name in dict.fromkeys(self.layer.spec.parameters)
        }
        for part, tensor in form.split(blocks):
            part.of(params).copy_(tensor)
        names = list(params) if self.layer.with_bias else [self.layer.weight]
        found = self.products.product({name: params[name] for name in names}, names)
        joined = form.join({**{k: torch.zeros_like(t) for k, t in params.items()}, **found})
        kept = joined if self.layer.with_bias or not self.layer.spec.sites else joined[..., : form.weight_inputs]
        return kept.reshape(b, -1).mT.to(X.dtype)

    def dense(self) -> Float[Tensor, "d d"]:
        """Column by column; symmetrised."""
        d = self.numel()
        require(16 * d * d, self.layer.sweep.memory, f"the dense Hessian of {d} entries", "use products and eigenpairs")
        matrix = self._times(torch.eye(d, dtype=self.dtype, device=self.device)).double()
        return (matrix + matrix.mT) / 2

    def trace(self, samples: int = 64, seed: int = 0) -> Tensor:
        """Exact for up to 3000 entries; otherwise an estimate with its standard error."""
        if self.numel() <= DENSE:
            return self.dense().diagonal().sum()
        return hutchinson_trace(
            self._times, self.numel(), samples, stream(seed, "trace"), self.dtype, self.device, chunk=16
        )


@in_own_arithmetic
def layer_hessian(
    model: nn.Module,
    data: Any,
    layer: str,
    likelihood: str | Likelihood = "categorical",
    *,
    gauss_newton: bool | None = None,
    bias: bool = False,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> LayerOperator:
    """The Hessian of the mean loss in the weight of one layer, row-major ``vec(W)``, W being m × n.

        H = 1/N Σ_n Σ_v r_nv r_nvᵀ,    r_nv = Σ_s g_vns ⊗ a_ns,    Σ_v g gᵀ = M_x

    which for a layer with one input x an example is ``E[M_x ⊗ x xᵀ]``. Positions that share the weight (pixels, tokens,
    repeated calls) are added up before they are squared: all terms between positions are in it.

    >>> import torch, layerwise as lw
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    >>> batch = torch.randn(20, 4), torch.randint(3, (20,))
    >>> H = lw.structure.layer_hessian(net, batch, "0")
    >>> values, vectors, residuals = H.eigenpairs(2)
    >>> H.matrix_shape, vectors.shape, bool((residuals < 1e-5).all())
    ((6, 4), torch.Size([24, 2]), True)

    Args:
        model: any module. In eval mode; dropout in train mode draws the same at every pass, from `seed`, and batch norm
            in train mode is an error.
        data: a batch ``(x, y)`` or any iterable of batches, which is gone over once where its rows fit in half of
            `memory`, and at every product otherwise.
        layer: the layer's name as `lw.layers` shows it, a parameter's, or a pattern that matches one layer.
        likelihood: what the output means; options as further arguments.
        gauss_newton: True for the Gauss–Newton matrix, False for the Hessian by autograd. None is for networks on which
            both are the same (piecewise-linear activations, no weight used twice): that is looked at on eight examples,
            and where it does not hold a choice is asked for.
        bias: whether the bias takes part, as the last column of W.
        dtype: what products are made in; default that of the model, float32 at least.
        options: `normalize`, `example_axis`, `seed`, `memory`, `progress`, `check`, `matrices` and those of the
            likelihood, as for `lw.fisher`.
    """
    if gauss_newton not in (None, True, False):
        raise InputError(describe(f"gauss_newton={gauss_newton!r}", "True, False or None", "choose one of them"))
    chosen = one_layer(model, data, layer, likelihood, bias=bias, **options)
    if gauss_newton is False:
        return autograd_hessian(chosen)
    rows = Rows.gather(chosen, dtype or chosen.dtype)
    if gauss_newton:
        return GaussNewton(rows)
    # without rows the layer takes no part, and both matrices are zero
    return GaussNewton(rows, 0.0 if rows.few is None else require_agreement(chosen, rows.few))


def autograd_hessian(layer: OneLayer) -> AutogradHessian:
    """Of the loss that the likelihood means, divided by N."""
    sweep = layer.sweep
    if sweep.normalize != "examples":
        raise InputError(
            describe('normalize="terms" and gauss_newton=False', 'normalize="examples"', "divide by the terms yourself")
        )
    sweep.source.require_passes(2, "products with the Hessian by autograd")
    recorder = sweep.recorder
    with recorder.session():
        batch = next(iter(Source(sweep.source.data, model=recorder.model).batches("the layer")))
        recorder.record(batch, sweep.likelihood)  # how the layer is used is seen when it is run
    return AutogradHessian(layer, HessianProducts(recorder.model, recorder, sweep.source, _loss(layer)))


def _loss(layer: OneLayer, added: Callable[[Tensor], Tensor] | None = None) -> Callable[[Tensor, Batch, int], Tensor]:
    """The sum of the likelihood's terms, and of something else in the output."""
    law, recorder = layer.sweep.likelihood, layer.sweep.recorder

    def loss(f: Tensor, batch: Batch, n: int) -> Tensor:
        terms = recorder.terms(f, batch, law, recorder.examples(batch))
        if added is None:
            return law.loss(terms).sum()
        return added(terms.f) if terms.y is None else law.loss(terms).sum() + added(terms.f)

    return loss


def require_agreement(layer: OneLayer, few: Batch) -> float:
    """Compare Gauss–Newton and Hessian products on a few examples; the relative difference, or an error.

    To the loss a random linear function of the outputs is added. It leaves the Gauss–Newton matrix as it is, and shows
    second derivatives of the outputs also where the loss is at its minimum, whose gradient hides them.
    """
    sweep = layer.sweep
    recorder = sweep.recorder
    small = replace(layer, sweep=replace(sweep, source=Source([(few.x, few.y, few.mask)], model=recorder.model)))
    signs = stream(0, "agreement")

    def added(f: Tensor) -> Tensor:
        return (torch.randint(0, 2, f.shape, generator=signs).to(f) * 2 - 1).mul(f).sum()

    hessian = AutogradHessian(small, HessianProducts(recorder.model, recorder, small.sweep.source, _loss(small, added)))
    v = torch.randn(hessian.numel(), 2, generator=stream(0, "direction"), dtype=torch.float64).to(layer.dtype)
    v = v.to(layer.device)
    rows = Rows.gather(small, layer.dtype)
    ours = rows.times(v) * (rows.count / rows.examples)
    exact = hessian @ v
    scale = float(torch.linalg.vector_norm(ours.double()))
    expected = torch.zeros_like(ours) if few.y is None else ours
    gap = float(torch.linalg.vector_norm((exact - expected).double()))
    found = gap / scale if scale else (0.0 if gap == 0 else float("inf"))
    if not found <= agreement_tolerance(layer):
        raise InputError(
            describe(
                f"layer {layer.spec.name!r}, whose Hessian and Gauss–Newton matrix differ by {found:.2g}, relatively: "
                "the outputs are not linear in its weight (a smooth activation, attention, a weight used twice)",
                "a choice of matrix",
                "pass gauss_newton=True or gauss_newton=False",
            )
        )
    return found


def agreement_tolerance(layer: OneLayer) -> float:
    """How far two ways to one product may be apart, by what the model computes in."""
    half = autocast_of_the_caller() or any(p.dtype in HALF for p in layer.sweep.recorder.model.parameters())
    return 0.1 if half else tolerance(layer.dtype, layer.device)
