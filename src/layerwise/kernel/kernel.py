"""`Kernel`: a matrix between functions of examples, formed or not.

Rows and columns are example-major: row ``n·P + p`` belongs to function p of example n.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.arithmetic import OwnArithmetic
from layerwise.foundations.errors import InputError, UnsupportedError, describe
from layerwise.foundations.linalg import guarded_eigh, lanczos_top, norm
from layerwise.foundations.random import stream
from layerwise.kernel.jacobian import read_functions
from layerwise.layers.capture.model_call import in_own_arithmetic

if TYPE_CHECKING:
    from layerwise.kernel.eigenfunctions import Eigenfunctions, KernelPCA

DENSE_EIGH = 4096
"""Up to this many rows the eigenvalues come from the matrix, above from products where only some are asked for."""


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
                    "normalize before centering, or K.per_layer() of square kernels",
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
        from layerwise.kernel.derived import Centered, check_centering

        check_centering(centering)
        return self if centering == "none" else Centered(self, centering)

    def normalized(self) -> "Kernel":
        """``K_ij / √(K_ii K_jj)``: cosines between features; rows of zero features stay zero."""
        from layerwise.kernel.derived import Normalized

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
        from layerwise.kernel.eigenfunctions import KernelPCA

        return KernelPCA.of(self, k, centering)

    def eigenfunctions(self, k: int) -> "Eigenfunctions":
        """The k leading eigenfunctions, which can be evaluated at new points."""
        from layerwise.kernel.eigenfunctions import Eigenfunctions

        return Eigenfunctions.of(self, k)

    def solve(self, y: Tensor, ridge: int | float, **options: Any) -> Tensor:
        """``(K + ridge I)⁻¹ y``: the coefficients of kernel regression; see `regression.solve`."""
        from layerwise.kernel.regression import solve

        return solve(self, y, ridge, **options)

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
