"""Eigenfunctions of a kernel, and the coordinates of examples along its principal components."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.arithmetic import OwnArithmetic
from layerwise.foundations.errors import NumericalError, describe
from layerwise.kernel.kernel import Kernel
from layerwise.layers.capture.model_call import in_own_arithmetic

FLOOR = 1e-10
"""Eigenvalues below this part of the largest have no eigenfunction that rounding would leave intact."""


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
