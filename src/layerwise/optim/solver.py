"""How inverses, roots and eigenbases of factors are found.

| `solver` | inverse (power 1) | other powers, EKFAC's and SOAP's bases |
|---|---|---|
| "eigh" | through the eigenbasis | `torch.linalg.eigh` |
| "cholesky" | by Cholesky | an error |
| "products" | by products of blocks, exactly | the last basis, some sweeps of products nearer |
| "auto" | "products" in float32 on a GPU, else "cholesky" | "products" in float32 on a GPU, else "eigh" (SOAP: QR) |

With "products" nothing waits for the device, and every refresh takes the same launches (`layerwise.optim.cuda`). It is
for float32; factors of float64 are decomposed as without it. It was called "newton" when inverses were refined from the
last ones.
"""

import torch

from layerwise.foundations.errors import InputError, describe

SOLVERS = ("auto", "eigh", "cholesky", "products")
EARLIER = {"newton": "products"}
"""Names of earlier versions."""


def method(solver: str, power: float, dtype: torch.dtype, device: torch.device) -> str:
    """ "eigh", "cholesky" or "products" for one factor that is raised to a power; 0 is for a basis.

    >>> cpu, gpu = torch.device("cpu"), torch.device("cuda")
    >>> method("auto", 1.0, torch.float32, cpu), method("auto", 0.25, torch.float32, gpu)
    ('cholesky', 'products')
    """
    if solver == "cholesky" and power != 1:
        raise InputError(
            describe(
                f'solver="cholesky" for a power of {power:g} or an eigenbasis',
                'solver="auto", "eigh" or "products"; Cholesky gives inverses alone',
                "pass one of them",
            )
        )
    on_gpu = device.type in ("cuda", "meta")  # without data: it stands for a GPU's
    if dtype == torch.float32 and (solver == "products" or (solver == "auto" and on_gpu)):
        return "products"
    if solver in ("eigh", "cholesky"):
        return solver
    return "cholesky" if power == 1 else "eigh"


def check_solver(solver: str, powers: tuple[float | None, float | None] | None) -> None:
    """Cholesky is for inverses alone."""
    for power in powers or ():
        if power is not None:
            method(solver, power, torch.float32, torch.device("cpu"))
