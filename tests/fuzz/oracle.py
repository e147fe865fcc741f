"""The truth, by autograd alone: no hooks, nothing of the library.

The cotangent of an entry is on the batch's own graph. In float64 all entries are pulled back at once, and a random
mixture of the rows must be what one plain backward of the mixture gives, to rounding; where it is not, and in every
other precision, there is one plain backward an entry. Where a model runs its examples alone, each example's own graph
must give the same; a case for which it does not has examples that interact, and is the generator's fault.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from cases import Batch, Case, outputs, trainable
from torch import Tensor, nn

ROUNDED = 1e-10
"""Of a parameter's Jacobian: as far as rows that were pulled back at once may be from plain ones in float64."""


def rows_of(model: nn.Module, f: Tensor) -> Tensor:
    """``[*f, d]``: the gradient of every entry."""
    rows = jacobian_rows(f, [p for _, p in trainable(model)])
    return torch.cat([r.reshape(len(r), -1) for r in rows], 1).reshape(*f.shape, -1).double()


def jacobian_rows(f: Tensor, targets: Sequence[Tensor]) -> list[Tensor]:
    """``[entries of f, *target]`` for each target."""
    rows = at_once(f, targets) if targets else []
    return one_by_one(f, targets) if rows is None else rows


def one_by_one(f: Tensor, targets: Sequence[Tensor]) -> list[Tensor]:
    """One plain backward an entry."""
    pulled = [_plain(entry, targets, None) for entry in f.reshape(-1)]
    return [torch.stack(of) for of in zip(*pulled, strict=True)]


def at_once(f: Tensor, targets: Sequence[Tensor]) -> list[Tensor] | None:
    """The same in one batched backward; None where it cannot be, or is not what plain backwards give.

    Rules for a batch of cotangents may be missing or wrong. Pulling back is linear: rows that differ from plain ones
    have random sums that differ.
    """
    if f.dtype != torch.float64 or not f.requires_grad or not f.numel():
        return None
    entries = torch.eye(f.numel(), dtype=f.dtype).reshape(-1, *f.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells where it loops
        try:
            found = torch.autograd.grad(
                f, targets, entries, retain_graph=True, is_grads_batched=True, allow_unused=True
            )
        except RuntimeError:
            return None
    rows = [_filled(g, t, f.numel()) for g, t in zip(found, targets, strict=True)]
    u = torch.randn(f.numel(), generator=torch.Generator().manual_seed(3), dtype=f.dtype)
    largest = max(float(r.norm()) for r in rows)
    for r, truth in zip(rows, _plain(f, targets, u.reshape(f.shape)), strict=True):
        if not float((torch.tensordot(u, r, 1) - truth).norm()) <= ROUNDED * (float(r.norm()) + 1e-3 * largest):
            return None
    return rows


def _plain(f: Tensor, targets: Sequence[Tensor], u: Tensor | None) -> list[Tensor]:
    grads: Sequence[Tensor | None] = [None] * len(targets)
    if f.requires_grad:
        grads = torch.autograd.grad(f, targets, u, retain_graph=True, allow_unused=True)
    return [_filled(g, t) for g, t in zip(grads, targets, strict=True)]


def _filled(g: Tensor | None, target: Tensor, *batch: int) -> Tensor:
    return target.new_zeros(*batch, *target.shape) if g is None else g.detach()


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
        self._apart: dict[int, float] = {}

    def changed(self) -> None:
        """Forget."""
        self._kept.clear()
        self._apart.clear()

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
        if number not in self._apart:
            batch, truth = self.case.batches[number], self.batch(number)
            alone = [rows_of(self.case.model, outputs(self.case.model, batch.alone(n))) for n in range(batch.n)]
            J = torch.stack([rows.reshape(truth.J.shape[1:]) for rows in alone])
            self._apart[number] = float((J - truth.J).norm() / truth.J.norm().clamp_min(1e-30))
        return self._apart[number]
