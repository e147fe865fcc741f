"""Random two-layer networks, drawn: what theorem 4.4.1 of Wu (2023) says of their Hessians, measured at a finite width.

No Hessian of n·d × n·d entries is built. It is FᵀF, a row of F being the Kronecker product of a row of B = Q W₂ D (with
A = QᵀQ) and an input; its eigenvectors are found from the Gram matrix F Fᵀ, which is a product of two small ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise import theory
from layerwise.foundations.linalg import lanczos_top
from layerwise.foundations.random import stream

AT_ONCE = 1000
"""Inputs that are in memory at a time."""


class Facts(NamedTuple):
    """Of one network; spaces are those of the c − 1 leading eigenvectors."""

    gap_of_outputs: float
    """λ_c / λ_{c−1} of M."""
    gap: float
    """λ_c / λ_{c−1} of H."""
    decoupled: float
    """Overlap of the spaces of H and of M ⊗ E[xxᵀ], all of the same inputs."""
    corrected: float
    """Overlap of the spaces of M and of the corrected closed form."""
    printed: float
    """Overlap of the spaces of M and of the printed closed form."""
    rows: float
    """Overlap of the space of M with the rows of W₂ diag(q), the sum of all left out."""
    active: float
    """The mean of q², which would be ¼ if every unit were active for half of the inputs."""


@dataclass(frozen=True, kw_only=True)
class TwoLayers:
    """x = relu(N(0, I_d)), d = n^(1 + α); entries of W₁ are N(0, 1/d), those of W₂ N(0, 1/n)."""

    n: int
    """Hidden units."""
    classes: int = 4
    alpha: float | int = 0.4
    centred: bool = False
    """Whether the rows of W₁ are made to sum to zero: then the printed closed form is right."""
    inputs: int = 6000
    """Drawn for M."""
    inputs_of_hessian: int = 600
    """The first of them, for H."""
    device: str = "cpu"

    @property
    def d(self) -> int:
        """Inputs of the network."""
        return round(self.n ** (1 + self.alpha))

    def measured(self, seed: int) -> Facts:
        """Draw a network and its inputs, and compare eigenspaces."""
        generator, c, n, d = stream(seed, "initialisation", self.n), self.classes, self.n, self.d

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.device)

        W1, W2 = normal(n, d) / d**0.5, normal(c, n) / n**0.5
        if self.centred:
            W1 -= W1.mean(1, keepdim=True)
        M, A = torch.zeros(n, n, dtype=W1.dtype, device=W1.device), torch.zeros(c, c, dtype=W1.dtype, device=W1.device)
        kept: list[tuple[Tensor, Tensor]] = []
        seen = 0
        while seen < self.inputs:
            x = normal(min(AT_ONCE, self.inputs - seen), d).relu_()
            Q, B = _roots(W1, W2, x)
            M += torch.einsum("sci,scj->ij", B, B)
            A += torch.einsum("sci,scj->ij", Q, Q)
            if (missing := self.inputs_of_hessian - seen) > 0:
                kept.append((B[:missing], x[:missing]))
            seen += len(x)
        M, A = M / seen, A / seen
        values, space = _leading(M, c)
        B, x = (torch.cat(parts) for parts in zip(*kept, strict=True))
        gap, decoupled = _hessian(B, x, generator)
        q, W2_, A_ = theory.active_probability(W1.cpu().numpy()), W2.cpu().numpy(), A.cpu().numpy()
        forms = (theory.initial_output_hessian(W2_, A_, q), theory.printed_initial_output_hessian(W2_, A_))
        corrected, printed = (overlap(space, _leading(torch.from_numpy(form).to(M), c)[1]) for form in forms)
        differences = (W2 - W2.mean(0)) * torch.from_numpy(q).to(W2)  # rows that sum to zero: c − 1 are independent
        rows = overlap(space, torch.linalg.qr(differences[:-1].mT).Q)
        return Facts(float(values[1] / values[0]), gap, decoupled, corrected, printed, rows, float((q**2).mean()))


def overlap(U: Float[Tensor, "n k"], V: Float[Tensor, "n k"]) -> float:
    """‖UᵀV‖² / k of two orthonormal bases."""
    return float((U.mT @ V).square().sum() / U.shape[1])


def _roots(
    W1: Float[Tensor, "n d"], W2: Float[Tensor, "c n"], x: Float[Tensor, "S d"]
) -> tuple[Float[Tensor, "S c c"], Float[Tensor, "S c n"]]:
    """Q = diag(√p)(I − 1pᵀ), whose square QᵀQ is the Hessian in the logits, and Q W₂ D."""
    z = x @ W1.mT
    p = (z.relu() @ W2.mT).softmax(1)
    Q = p.sqrt().unsqueeze(2) * (torch.eye(len(W2), dtype=p.dtype, device=p.device) - p.unsqueeze(1))
    return Q, Q @ W2 * (z > 0).unsqueeze(1)


def _leading(M: Float[Tensor, "n n"], c: int) -> tuple[Float[Tensor, "2"], Float[Tensor, "n k"]]:
    """λ_{c−1} and λ_c, and the c − 1 leading eigenvectors."""
    values, vectors = torch.linalg.eigh(M)
    return values[[1 - c, -c]], vectors[:, 1 - c :]


def _hessian(B: Float[Tensor, "S c n"], x: Float[Tensor, "S d"], generator: torch.Generator) -> tuple[float, float]:
    """λ_c / λ_{c−1} of H = E[BᵀB ⊗ xxᵀ], and the overlap of its leading space with that of E[BᵀB] ⊗ E[xxᵀ].

    The mean input leads E[xxᵀ] by far, so that the c − 1 leading eigenvectors of the latter are all u ⊗ v with that v.
    """
    S, c, _ = B.shape
    rows, of_inputs = B.flatten(0, 1), x @ x.mT
    space = _leading(rows.mT @ rows, c)[1]
    gram = of_inputs.repeat_interleave(c, 0).repeat_interleave(c, 1) * (rows @ rows.mT) / S
    values, a, _ = lanczos_top(lambda X: gram @ X, S * c, c, generator=generator, dtype=gram.dtype, device=gram.device)
    _, by_input, _ = lanczos_top(lambda X: of_inputs @ X, S, 1, generator=generator, dtype=x.dtype, device=x.device)
    v = by_input.mT @ x  # of the Gram matrix's eigenvector, that of E[xxᵀ]
    along = (x @ (v / v.norm()).mT).repeat_interleave(c, 0)
    # h = Fᵀa/√λ, and ⟨u ⊗ v, h⟩ = Σ_rows a_r (u·B_r)(v·x_r) / √(Sλ)
    products = space.mT @ rows.mT @ (along * a[:, 1:]) / (S * values[1:]).sqrt()
    return float(values[0] / values[1]), float(products.square().sum() / space.shape[1])
