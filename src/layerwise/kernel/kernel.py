"""`Kernel`: a matrix between functions of examples, formed or not, and what is made from one.

Rows and columns are example-major: row ``n·P + p`` belongs to function p of example n. Kernels that are derived from a
kernel (`Centered`, `Normalized`) and its `Eigenfunctions` stand here too: each of them is a method's result.
"""

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.arithmetic import OwnArithmetic
from layerwise.foundations.errors import InputError, NumericalError, UnsupportedError, describe, not_one_of
from layerwise.foundations.linalg import conjugate_gradient, guarded_cholesky, guarded_eigh, lanczos_top, norm
from layerwise.foundations.random import stream
from layerwise.kernel.jacobian import read_functions
from layerwise.layers.capture.model_call import in_own_arithmetic

DENSE_EIGH = 4096
"""Up to this many rows the eigenvalues come from the matrix, above from products where only some are asked for."""
CENTERINGS = ("per-output", "global", "none")
FLOOR = 1e-10
"""Eigenvalues below this part of the largest have no eigenfunction that rounding would leave intact."""


class Kernel(OwnArithmetic, ABC, guard=in_own_arithmetic):
    """Between N and M examples, P functions of each."""

    n: int
    """Examples of the first set."""
    m: int
    """Examples of the second set."""
    out_shape: tuple[int, ...]
    """Shape of the functions of one example."""
    is_square: bool
    """Whether both sets are one: then the kernel is symmetric and positive semi-definite."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of the matrix."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it is computed."""

    @abstractmethod
    def matrix(self) -> Float[Tensor, "NP MP"]:
        """The whole matrix, example-major; kept for later calls."""

    @abstractmethod
    def apply(self, u: Float[Tensor, "B MP"]) -> Float[Tensor, "B NP"]:
        """``K u`` for columns."""

    @abstractmethod
    def diag(self) -> Float[Tensor, "NP"]:
        """The diagonal of a square kernel."""

    @abstractmethod
    def has_matrix(self) -> bool:
        """Whether the matrix is formed, or small enough to be formed where it helps."""

    @abstractmethod
    def cross(self, x: Any) -> "Kernel":
        """The kernel between new examples and this one's second set."""

    # --- shape -------------------------------------------------------------------------------------------

    @property
    def functions(self) -> int:
        """P."""
        return torch.Size(self.out_shape).numel()

    @property
    def shape(self) -> tuple[int, int]:
        """(N·P, M·P)."""
        return self.n * self.functions, self.m * self.functions

    def require_square(self, what: str) -> None:
        """Refuse what only a kernel of one set with itself has."""
        if not self.is_square:
            raise InputError(
                describe(
                    f"{what} of a kernel between two sets ({self.n} and {self.m} examples)",
                    "a kernel of one set",
                    "leave out x2=",
                )
            )

    # --- algebra -----------------------------------------------------------------------------------------

    def __matmul__(self, u: Any) -> Tensor:
        """``K u``, without forming K unless it is there already.

        u in the outputs' own shape ``[M, *out]``, flat ``[M·P]``, or columns ``[M·P, B]``; the result likewise.
        """
        columns, kind = read_functions(u, self.m, self.out_shape, self.dtype, self.device)
        return self._written(self.apply(columns), kind, u.dtype)

    def _written(self, columns: Float[Tensor, "B NP"], kind: str, dtype: torch.dtype) -> Tensor:
        if kind == "shaped":
            return columns[0].view(self.n, *self.out_shape).to(dtype)
        return columns[0].to(dtype) if kind == "flat" else columns.mT.to(dtype)

    def diagonals(self) -> tuple[Float[Tensor, "NP"], Float[Tensor, "MP"]]:
        """Squared norms of the features of both sets."""
        if not self.is_square:
            raise UnsupportedError(
                describe(
                    f"norms of features from a {type(self).__name__} between two sets",
                    "a square kernel, or the one that lw.ntk returned",
                    "normalize before centering, or take K.per_layer() of square kernels",
                )
            )
        found = self.diag()
        return found, found

    def trace(self) -> Float[Tensor, ""]:
        """``Σ_n Σ_p K[np, np]``."""
        return self.diag().sum()

    def frobenius(self) -> Float[Tensor, ""]:
        """``‖K‖_F``."""
        return norm(self.matrix())

    def eigenvalues(self, k: int | None = None) -> Float[Tensor, "k"]:
        """The k largest eigenvalues, or all, ascending."""
        return self.eigh(k)[0]

    def eigh(self, k: int | None = None, seed: int = 0) -> tuple[Float[Tensor, "k"], Float[Tensor, "NP k"]]:
        """The k largest eigenvalues, or all, ascending, and their eigenvectors as columns.

        From the matrix where it is small or all are asked for, else by Lanczos iterations on products.
        """
        self.require_square("eigenvalues")
        rows = self.shape[0]
        if k is not None and not 1 <= k <= rows:
            raise InputError(describe(f"k={k}", f"a number from 1 to {rows}, or None for all", "choose fewer"))
        if k is None or rows <= DENSE_EIGH or 4 * k >= rows or self.has_matrix():
            values, vectors = guarded_eigh(self.matrix(), name="tangent kernel")
            return (values, vectors) if k is None else (values[-k:], vectors[:, -k:])
        tol = 1e-8 if self.dtype == torch.float64 else 1e-5
        values, vectors, _ = lanczos_top(
            lambda X: self.apply(X.mT.contiguous()).mT,
            rows,
            k,
            generator=stream(seed, "lanczos"),
            dtype=self.dtype,
            device=self.device,
            tol=tol,
        )
        return values.clamp_min(0), vectors

    def to_scipy(self) -> Any:
        """A `scipy.sparse.linalg.LinearOperator` over flat vectors."""
        import numpy as np
        from scipy.sparse.linalg import LinearOperator

        def product(kernel: Kernel, X: Any) -> Any:
            columns = torch.as_tensor(np.ascontiguousarray(X)).to(kernel.device, kernel.dtype)
            out = kernel.apply(columns.reshape(kernel.shape[1], -1).mT.contiguous()).mT
            return out.cpu().numpy().reshape(kernel.shape[0], *X.shape[1:])

        products = {"matvec": lambda X: product(self, X), "matmat": lambda X: product(self, X)}
        if self.is_square:
            products |= {"rmatvec": products["matvec"], "rmatmat": products["matmat"]}
        dtype = {torch.float64: np.float64}.get(self.dtype, np.float32)
        return LinearOperator(shape=self.shape, dtype=dtype, **products)  # type: ignore[call-arg]

    # --- other kernels from this one ---------------------------------------------------------------------

    def centered(self, centering: str = "per-output") -> "Kernel":
        """The kernel of centred features.

        "per-output" subtracts from every feature ``∂f_p(x)/∂θ`` its mean over the examples, for each function p
        (``(C_N ⊗ I_P) K (C_M ⊗ I_P)``); "global" subtracts the mean over examples and functions together
        (``C_NP K C_MP``); "none" leaves the kernel as it is. Each of two sets is centred by its own mean.
        """
        check_centering(centering)
        return self if centering == "none" else Centered(self, centering)

    def normalized(self) -> "Kernel":
        """``K_ij / √(K_ii K_jj)``: cosines between features; rows of zero features stay zero."""
        return Normalized(self)

    def per_layer(self) -> dict[str, "Kernel"]:
        """One kernel a layer; they add up to this one."""
        raise UnsupportedError(
            describe(
                f"per_layer() of a {type(self).__name__.lower()} kernel",
                "a tangent kernel from lw.ntk",
                "take K.per_layer() first and derive from each layer's kernel",
            )
        )

    def plan(self) -> Any:
        """What computing the matrix does and costs."""
        raise UnsupportedError(
            describe(
                f"plan() of a {type(self).__name__.lower()} kernel",
                "a tangent kernel from lw.ntk",
                "print the plan of the kernel it was derived from",
            )
        )

    # --- uses --------------------------------------------------------------------------------------------

    def kernel_pca(self, k: int, centering: str = "per-output") -> "KernelPCA":
        """Coordinates of the examples' functions along the k largest principal components of their features."""
        return KernelPCA.of(self, k, centering)

    def eigenfunctions(self, k: int) -> "Eigenfunctions":
        """The k leading eigenfunctions, which can be evaluated at new points."""
        return Eigenfunctions.of(self, k)

    def solve(
        self,
        y: Tensor,
        ridge: int | float,
        *,
        method: str = "auto",
        tol: float | None = None,
        max_iterations: int = 1000,
    ) -> Tensor:
        """``α = (K + ridge I)⁻¹ y``, in the shape of y.

        The linearized model ``f₀(x) + J(x) w`` that minimizes ``‖y − J w‖² + ridge ‖w‖²`` has ``w = Jᵀ α``, and
        ``K.predict(x, α)`` is what it adds to ``f₀`` at new points. y is usually ``targets − f₀(x)``.

        >>> import torch, layerwise as lw
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> x, y = torch.randn(16, 4), torch.randn(16, 3)
        >>> K = lw.ntk(model, x)
        >>> alpha = K.solve(y - model(x), ridge=1e-2)
        >>> K.predict(torch.randn(5, 4), alpha).shape
        torch.Size([5, 3])

        Args:
            y: ``[N, *out]``, ``[N·P]`` or columns ``[N·P, B]``.
            ridge: a number ≥ 0; 0 needs a positive definite kernel.
            method: "dense" (Cholesky of the matrix), "cg" (products only, for large N), or "auto": dense where the
                matrix is there or has at most 4096 rows.
            tol: relative residual at which "cg" stops; default 1e-10 in float64 and 1e-5 in float32.
            max_iterations: of "cg".
        """
        self.require_square("solve()")
        if not (ridge >= 0 and ridge < float("inf")):
            raise InputError(describe(f"ridge={ridge}", "a finite number ≥ 0", "pass e.g. ridge=1e-3"))
        if method not in ("auto", "dense", "cg"):
            raise InputError(not_one_of("method", method, ("auto", "dense", "cg")))
        columns, kind = read_functions(y, self.n, self.out_shape, self.dtype, self.device)
        if method == "dense" or (method == "auto" and (self.has_matrix() or self.shape[0] <= DENSE_EIGH)):
            found = self._solve_dense(columns, ridge)
        else:
            found = self._solve_by_products(columns, ridge, tol, max_iterations)
        return self._written(found, kind, y.dtype)

    def _solve_dense(self, columns: Float[Tensor, "B NP"], ridge: int | float) -> Float[Tensor, "B NP"]:
        try:
            root = guarded_cholesky(self.matrix(), name="tangent kernel", damping=ridge)
        except NumericalError as error:
            raise NumericalError(
                describe(
                    f"a kernel of {self.shape[0]} rows that is not positive definite with ridge={ridge}",
                    "a positive definite K + ridge I",
                    f"pass ridge > {ridge:g}",
                )
            ) from error
        return torch.cholesky_solve(columns.mT.to(root), root).mT.to(columns.dtype)

    def _solve_by_products(self, columns: Tensor, ridge: int | float, tol: float | None, max_iterations: int) -> Tensor:
        if tol is None:
            tol = 1e-10 if self.dtype == torch.float64 else 1e-5

        def product(X: Tensor) -> Tensor:
            return self.apply(X.mT.contiguous()).mT + ridge * X

        result = conjugate_gradient(product, columns.mT, tol=tol, max_iterations=max_iterations)
        if not bool(torch.isfinite(result.solution).all()):
            raise NumericalError(
                describe(
                    f"a kernel for which conjugate gradients broke down (ridge={ridge})",
                    "a positive definite K + ridge I",
                    'raise ridge=, or use method="dense"',
                )
            )
        if not result.converged:
            warnings.warn(
                f"conjugate gradients stopped after {result.iterations} products above the residual {tol:g}; "
                "raise ridge=, tol= or max_iterations=",
                stacklevel=4,
            )
        return result.solution.mT

    def predict(self, x: Any, coefficients: Tensor) -> Tensor:
        """``k(x, X) coefficients``: what the regression adds to the functions at new points."""
        new = self.cross(x)
        columns, kind = read_functions(coefficients, self.m, self.out_shape, self.dtype, self.device)
        return new._written(new.apply(columns), kind, coefficients.dtype)

    def __repr__(self) -> str:
        rows, columns = self.shape
        return f"{type(self).__name__}({rows} × {columns}, functions an example: {self.functions}, {self.dtype})"


@dataclass(frozen=True, eq=False, repr=False)
class MatrixKernel(Kernel):
    """A kernel given by its matrix."""

    values: Float[Tensor, "NP MP"]
    out_shape: tuple[int, ...] = ()
    is_square: bool = True

    def __post_init__(self) -> None:
        rows, columns = self.values.shape
        P = self.functions
        if P < 1 or rows % P or columns % P or (self.is_square and rows != columns):
            raise InputError(
                describe(
                    f"a matrix of shape {tuple(self.values.shape)} for functions of shape {self.out_shape}",
                    f"{'as many rows as columns' if self.is_square else 'rows and columns'}, a multiple of {P}",
                    "pass the matrix example-major",
                )
            )

    @property
    def n(self) -> int:  # type: ignore[override]
        """N."""
        return self.values.shape[0] // self.functions

    @property
    def m(self) -> int:  # type: ignore[override]
        """M."""
        return self.values.shape[1] // self.functions

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Of the matrix."""
        return self.values.device

    def matrix(self) -> Float[Tensor, "NP MP"]:
        """As given."""
        return self.values

    def has_matrix(self) -> bool:
        """Always."""
        return True

    def apply(self, u: Float[Tensor, "B MP"]) -> Float[Tensor, "B NP"]:
        """``K u``."""
        return u @ self.values.mT

    def diag(self) -> Float[Tensor, "NP"]:
        """The diagonal."""
        self.require_square("the diagonal")
        return self.values.diagonal()

    def cross(self, x: Any) -> Kernel:
        """Not known."""
        raise UnsupportedError(
            describe(
                "new points for a kernel given as a matrix",
                "a kernel that knows its model",
                "use the kernel that lw.ntk returned",
            )
        )


# --- kernels made from a kernel ------------------------------------------------------------------------------------


def check_centering(centering: str) -> None:
    """A centering by name."""
    if centering not in CENTERINGS:
        raise InputError(not_one_of("centering", centering, CENTERINGS))


def center(rows: Float[Tensor, "*B NP"], functions: int, centering: str) -> Float[Tensor, "*B NP"]:
    """Vectors over functions of examples, minus their mean over examples (for each function) or over everything."""
    check_centering(centering)
    if centering == "none":
        return rows
    if centering == "global":
        return rows - rows.mean(-1, keepdim=True)
    by_example = rows.unflatten(-1, (-1, functions))
    return (by_example - by_example.mean(-2, keepdim=True)).flatten(-2)


@dataclass(frozen=True, eq=False, repr=False)
class Derived(Kernel):
    """A kernel that is made from another of the same shape."""

    of: Kernel

    @property
    def n(self) -> int:  # type: ignore[override]
        """N."""
        return self.of.n

    @property
    def m(self) -> int:  # type: ignore[override]
        """M."""
        return self.of.m

    @property
    def out_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Of the functions."""
        return self.of.out_shape

    @property
    def is_square(self) -> bool:  # type: ignore[override]
        """As the other."""
        return self.of.is_square

    @property
    def dtype(self) -> torch.dtype:
        """As the other."""
        return self.of.dtype

    @property
    def device(self) -> torch.device:
        """As the other."""
        return self.of.device

    def has_matrix(self) -> bool:
        """As the other."""
        return self.of.has_matrix()

    @cached_property
    def _matrix(self) -> Tensor:
        return self._from(self.of.matrix())

    @abstractmethod
    def _from(self, K: Tensor) -> Tensor:
        """This kernel's matrix from the other's."""

    def matrix(self) -> Float[Tensor, "NP MP"]:
        """Formed from the other's matrix."""
        return self._matrix


@dataclass(frozen=True, eq=False, repr=False)
class Centered(Derived):
    """``C K C``, with the centering matrices of rows and columns."""

    centering: str = "per-output"

    def _from(self, K: Tensor) -> Tensor:
        rows = center(K, self.functions, self.centering)
        return center(rows.mT, self.functions, self.centering).mT.contiguous()

    def apply(self, u: Float[Tensor, "B MP"]) -> Float[Tensor, "B NP"]:
        """``C (K (C u))``."""
        return center(self.of.apply(center(u, self.functions, self.centering)), self.functions, self.centering)

    def diag(self) -> Float[Tensor, "NP"]:
        """``K_ii − 2 ⟨φ_i, φ̄⟩ + ‖φ̄‖²``, through products with the indicator vectors of the means."""
        self.require_square("the diagonal")
        if self.has_matrix():
            return self.matrix().diagonal()
        P, rows = self.functions, self.shape[0]
        if self.centering == "global":
            means = torch.full((1, rows), 1 / rows, dtype=self.dtype, device=self.device)
        else:
            means = torch.eye(P, dtype=self.dtype, device=self.device).repeat(1, self.n) / self.n
        with_mean = self.of.apply(means)  # ⟨φ_i, φ̄_p⟩
        squares = (with_mean * means).sum(1)  # ‖φ̄_p‖²
        if self.centering == "global":
            return self.of.diag() - 2 * with_mean[0] + squares
        own = with_mean.view(P, self.n, P).diagonal(dim1=0, dim2=2)  # each function with its own mean: N, P
        return self.of.diag() - 2 * own.reshape(-1) + squares.repeat(self.n)

    def cross(self, x: Any) -> Kernel:
        """New examples, centred by the mean of the second set."""
        between = self.of.cross(x).matrix()
        self.require_square("centred features at new points")
        mean = _row_means(self.of.matrix(), self.functions, self.centering)  # ⟨φ̄, φ_j⟩
        shifted = between - mean.repeat(between.shape[0] // mean.shape[0], 1)
        return MatrixKernel(center(shifted, self.functions, self.centering), self.out_shape, is_square=False)


def _row_means(K: Tensor, functions: int, centering: str) -> Tensor:
    if centering == "global":
        return K.mean(0, keepdim=True)
    return K.unflatten(0, (-1, functions)).mean(0)


@dataclass(frozen=True, eq=False, repr=False)
class Normalized(Derived):
    """Cosines between features."""

    @cached_property
    def _scales(self) -> tuple[Tensor, Tensor]:
        first, second = self.of.diagonals()
        return _inverse_root(first), _inverse_root(second)

    def _from(self, K: Tensor) -> Tensor:
        rows, columns = self._scales
        return rows.unsqueeze(1) * K * columns

    def apply(self, u: Float[Tensor, "B MP"]) -> Float[Tensor, "B NP"]:
        """``D (K (D u))``."""
        rows, columns = self._scales
        return rows * self.of.apply(columns * u)

    def diag(self) -> Float[Tensor, "NP"]:
        """Ones, but where a feature is zero."""
        self.require_square("the diagonal")
        return self.of.diag() * self._scales[0].square()

    def cross(self, x: Any) -> Kernel:
        """Cosines with new examples."""
        return Normalized(self.of.cross(x))


def _inverse_root(diagonal: Tensor) -> Tensor:
    return torch.where(diagonal > 0, diagonal.clamp_min(torch.finfo(diagonal.dtype).tiny).rsqrt(), 0.0)


# --- eigenfunctions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Eigenfunctions(OwnArithmetic, guard=in_own_arithmetic):
    """``u_j(x) = k(x, X) U_j / λ_j`` (Nyström): at the examples themselves, ``u_j = U_j``.

    Orthonormal for the sum over the examples' functions. `population` rescales values at points by ``√N``, and
    eigenvalues by ``1/N``, to estimate the eigenfunctions and eigenvalues of the kernel under the data's
    distribution, orthonormal for the mean over examples.
    """

    kernel: Kernel
    values: Float[Tensor, "k"]
    """Eigenvalues, largest first."""
    vectors: Float[Tensor, "NP k"]
    """Values at the examples, one column an eigenfunction."""

    @classmethod
    def of(cls, kernel: Kernel, k: int) -> "Eigenfunctions":
        """The k leading ones."""
        values, vectors = kernel.eigh(k)
        values, vectors = values.flip(0), vectors.flip(1)
        kept = int((values > FLOOR * values[0]).sum())
        if kept < k:
            raise NumericalError(
                describe(
                    f"k={k} eigenfunctions of a kernel whose eigenvalues vanish after {kept}",
                    f"at most {kept}",
                    f"pass k={kept}" if kept else "check that the functions depend on the parameters",
                )
            )
        return cls(kernel, values, vectors)

    def __call__(self, x: Any, population: bool = False) -> Float[Tensor, "M *functions k"]:
        """Values at new points: ``[M, *out, k]``."""
        new = self.kernel.cross(x)
        at = (new.apply(self.vectors.mT.contiguous()) / self.values.unsqueeze(1)).mT
        return self._shaped(at, new.n, population)

    def at_examples(self, population: bool = False) -> Float[Tensor, "N *functions k"]:
        """Values at the kernel's own examples."""
        return self._shaped(self.vectors, self.kernel.n, population)

    def eigenvalues(self, population: bool = False) -> Float[Tensor, "k"]:
        """Of the kernel's matrix, or (`population`) of the kernel under the data's distribution."""
        return self.values / self.kernel.n if population else self.values

    def _shaped(self, at: Tensor, n: int, population: bool) -> Tensor:
        scaled = at * self.kernel.n**0.5 if population else at
        return scaled.reshape(n, *self.kernel.out_shape, -1)


@dataclass(frozen=True, eq=False)
class KernelPCA(OwnArithmetic, guard=in_own_arithmetic):
    """Principal components of centred features: ``coordinates = U √λ``."""

    functions: Eigenfunctions
    total: Float[Tensor, ""]
    """Trace of the centred kernel."""

    @classmethod
    def of(cls, kernel: Kernel, k: int, centering: str) -> "KernelPCA":
        """The k leading components."""
        kernel.require_square("principal components")
        centered = kernel.centered(centering)
        return cls(Eigenfunctions.of(centered, k), centered.trace())

    @property
    def coordinates(self) -> Float[Tensor, "N *functions k"]:
        """``[N, *out, k]``, largest component first."""
        return self.functions.at_examples() * self.functions.values.sqrt()

    @property
    def eigenvalues(self) -> Float[Tensor, "k"]:
        """Largest first."""
        return self.functions.values

    @property
    def explained(self) -> Float[Tensor, "k"]:
        """The part of the trace that each component holds."""
        return self.eigenvalues / self.total

    def project(self, x: Any) -> Float[Tensor, "M *functions k"]:
        """Coordinates of new points, centred by the examples' mean."""
        return self.functions(x) * self.functions.values.sqrt()
