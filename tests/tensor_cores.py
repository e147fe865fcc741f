"""Products of half precision on a CPU as a GPU computes them, and matrices with the spectra that momenta have."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from random_tensors import randn, randn64

PRODUCTS = (torch.baddbmm, torch.bmm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class TensorCores(TorchFunctionMode):
    """Half-precision operands, sums and scalars in float32, the result rounded once.

    A CPU may sum in fp16, and rounds a scalar to the tensor's type before it is added.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype in (torch.float16, torch.bfloat16):
            if func in PRODUCTS:
                return func(*(X.float() for X in args), **kwargs).to(args[0].dtype)
            if func is torch.Tensor.add_:
                return args[0].copy_(args[0].float() + args[1])
        return func(*args, **kwargs)


def with_singular_values(values: Tensor, columns: int, device: str = "cpu") -> Tensor:
    """A matrix of random singular vectors."""
    rows = len(values)
    U = torch.linalg.qr(randn64(rows, rows, device=device))[0]
    V = torch.linalg.qr(randn64(columns, rows, seed=1, device=device))[0]
    return ((U * values.to(U)) @ V.mT).float()


def with_one_large(rows: int, columns: int, rest: float, device: str) -> Tensor:
    X = rest * randn(rows, columns, device=device)
    X[rows // 2, columns // 3] = 1.0
    return X


def spectra(rows: int, columns: int, device: str = "cpu") -> dict[str, Tensor]:
    """Matrices of ``rows ≤ columns``: well- and ill-conditioned, of low rank, and with entries of all magnitudes."""
    i = torch.arange(1.0, rows + 1, dtype=torch.float64)
    few, one = i <= max(rows // 16, 1), i <= 1

    def of(values: Tensor) -> Tensor:
        return with_singular_values(values, columns, device)

    gaussian = randn(rows, columns, device=device)
    steep = gaussian.clone()
    steep[1] *= 1e4
    sparse = gaussian.clone()
    sparse[:, ::2], sparse[::3] = 0.0, 0.0
    return {
        "gaussian": gaussian,
        "1/i": of(1 / i),
        "1/i²": of(1 / i**2),
        "condition 1e4": of(10 ** (-4 * i / rows)),
        "condition 1e8": of(10 ** (-8 * i / rows)),
        "low rank and noise": of(torch.where(few, 1.0, 1e-4)),
        "one and noise": of(torch.where(one, 1.0, 1e-4)),
        "rank one": of(torch.where(one, 1.0, 0.0)),
        "rank a quarter": of(torch.where(i <= rows // 4, 1.0, 0.0)),
        "orthogonal": of(torch.ones(rows)),
        "one entry a million times the others": with_one_large(rows, columns, 1e-6, device),
        "one entry a thousand times the others": with_one_large(rows, columns, 1e-3, device),
        "one large row": steep,
        "rows and columns of zeros": sparse,
        "ones": torch.ones(rows, columns, device=device),
    }


def quintic(X: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """The iteration as Jordan et al. print it, in float64."""
    a, b, c = coefficients
    Y = X.double() / X.double().norm(dim=(-2, -1), keepdim=True).clamp_min(1e-30)
    for _ in range(steps):
        S = Y @ Y.mT
        Y = a * Y + (b * S + c * S @ S) @ Y
    return Y


def relative(found: Tensor, exact: Tensor) -> float:
    """The error's norm over the exact one's."""
    return float((found.double() - exact).norm() / exact.norm())
