"""The truth, by plain autograd: one backward an entry of the output, no hooks, no vmap, nothing of the library.

The cotangent of an entry is on the batch's own graph. Where a model runs its examples alone, each example's own graph
must give the same; a case for which it does not has examples that interact, and is the generator's fault.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from cases import Batch, Case, outputs, trainable
from torch import Tensor, nn


def rows_of(model: nn.Module, f: Tensor) -> Tensor:
    """``[*f, d]``: the gradient of every entry."""
    parameters = [p for _, p in trainable(model)]
    rows = []
    for entry in f.reshape(-1):
        grads: list[Tensor | None] = [None] * len(parameters)
        if entry.requires_grad:
            grads = list(torch.autograd.grad(entry, parameters, retain_graph=True, allow_unused=True))
        flat = [(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in zip(parameters, grads, strict=True)]
        rows.append(torch.cat(flat))
    return torch.stack(rows).reshape(*f.shape, -1).double()


@dataclass
class Truth:
    """Of one batch: outputs ``[N, S, C]`` and their Jacobian ``[N, S, C, d]``."""

    z: Tensor
    J: Tensor
    y: Tensor
    likelihood: str
    options: Mapping[str, Any]

    @classmethod
    def of(cls, model: nn.Module, batch: Batch, likelihood: str, options: Mapping[str, Any]) -> "Truth":
        f = outputs(model, batch.x)
        J = rows_of(model, f)
        z = f.detach().double()
        shape = (batch.n, -1, z.shape[-1])
        return cls(z.reshape(shape), J.reshape(*z.reshape(shape).shape, J.shape[-1]), batch.y, likelihood, options)

    @property
    def counted(self) -> Tensor:
        """``[N, S]``: m_ns w_{y_ns}."""
        c = torch.ones(self.z.shape[:2], dtype=torch.float64)
        if self.likelihood != "categorical":
            return c
        y = self.y.reshape(c.shape)
        ignored = y == self.options.get("ignore_index", -100)
        weight = self.options.get("weight")
        c = c if weight is None else weight.double()[y.masked_fill(ignored, 0)]
        return c.masked_fill(ignored, 0.0)

    def output_fisher(self) -> Tensor:
        """``[N, S, C, C]``, what does not count being zero."""
        if self.likelihood == "categorical":
            p = self.z.softmax(-1)
            H = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
        else:
            q = self.z.sigmoid()
            H = torch.diag_embed(q * (1 - q) if self.likelihood == "bernoulli" else torch.ones_like(q))
        return self.counted[..., None, None] * H

    def slopes(self) -> Tensor:
        """``[N, S, C]``: ∂ℓ_n/∂z."""
        if self.likelihood == "categorical":
            y = self.y.reshape(self.z.shape[:2])
            hit = F.one_hot(y.masked_fill(y < 0, 0), self.z.shape[-1])
            return self.counted.unsqueeze(-1) * (self.z.softmax(-1) - hit)
        y = self.y.double().reshape(self.z.shape)
        return (self.z if self.likelihood == "gaussian" else self.z.sigmoid()) - y

    def fisher_sum(self, estimator: str) -> Tensor:
        """Σ_n, not divided by N."""
        if estimator == "exact":
            return torch.einsum("nsci,nscd,nsdj->ij", self.J, self.output_fisher(), self.J)
        g = self.gradients()
        return g.T @ g

    def gradients(self) -> Tensor:
        """``[N, d]``: ∂ℓ_n/∂θ."""
        return torch.einsum("nsci,nsc->ni", self.J, self.slopes())

    def flat(self) -> Tensor:
        """``[N·S·C, d]``, example-major."""
        return self.J.flatten(0, 2)


class Oracle:
    """The truth of a case as it is now; `changed` after every change of the model or of its batches."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._kept: dict[int, Truth] = {}

    def changed(self) -> None:
        """Forget."""
        self._kept.clear()

    def batch(self, number: int) -> Truth:
        """Of one batch."""
        if number not in self._kept:
            case = self.case
            self._kept[number] = Truth.of(case.model, case.batches[number], case.spec.likelihood, case.options)
        return self._kept[number]

    def fisher(self, estimator: str, numbers: list[int]) -> Tensor:
        """1/N Σ_n over some batches."""
        total: Any = sum(self.batch(i).fisher_sum(estimator) for i in numbers)
        return total / sum(self.case.batches[i].n for i in numbers)

    def alone(self, number: int) -> float:
        """How far the Jacobian is from that of every example run alone, relatively."""
        batch, truth = self.case.batches[number], self.batch(number)
        alone = [rows_of(self.case.model, outputs(self.case.model, batch.alone(n))) for n in range(batch.n)]
        J = torch.stack([rows.reshape(truth.J.shape[1:]) for rows in alone])
        return float((J - truth.J).norm() / truth.J.norm().clamp_min(1e-30))
