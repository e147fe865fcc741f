"""What the gradient at a model's output tells of the loss: which likelihood, and by what it was multiplied.

For a categorical output it is ``c (p − e_y)``, p the softmax of the output and e_y perhaps smoothed; for a Bernoulli
output ``c (q − y)``, q its sigmoid. c is 1/N for a mean over N examples, 1 for a sum, and carries whatever else the
loss was multiplied by.
"""

import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations import likelihoods
from layerwise.foundations.errors import LayerwiseError, describe
from layerwise.foundations.random import stream
from layerwise.layers.capture.model_call import as_statistics
from layerwise.optim.statistics.loss_scale import LossScale, class_axis

MOST_ROWS = 4096
"""Rows (or a thousand times as many entries) that are looked at."""
LOOKS = 10
"""Steps after which an output that could not be told apart counts as unknown."""
SPREAD = 0.05
"""Of the outputs: while they are all alike, a square loss looks like a Bernoulli one."""
EMPIRICAL = "statistics are those of the loss's own gradients (the empirical Fisher matrix)"
LAWS = ("categorical", "bernoulli", "empirical")
SWEEPS = 5
"""Of finding labels and their smoothing by turns."""
SHARE = 0.2
"""Of entries that must be those of a target of exactly 0 or 1."""


class Reading(NamedTuple):
    """One backward's."""

    law: str | None
    """ "categorical", "bernoulli", or None where it is neither."""
    scale: float | None = None
    """c, where it is the same for all examples."""
    rows: int = 0
    """Positions that have a gradient."""
    sure: bool = True
    """Whether a further look would not help."""


def read(f: Tensor, g: Tensor) -> Reading | None:
    """The likelihood by an output and its gradient; None where the gradient is zero or not finite.

    >>> f, y = torch.randn(8, 5, requires_grad=True), torch.arange(8) % 5
    >>> g, = torch.autograd.grad(3 * torch.nn.functional.cross_entropy(f, y), f)
    >>> law, scale, *_ = read(f.detach(), g)
    >>> law, round(scale * 8, 3)
    ('categorical', 3.0)
    """
    g = g.detach()
    if not bool(torch.isfinite(g).all()) or not bool((g != 0).any()):
        return None
    rounding = max(1e-2, 4 * torch.finfo(g.dtype).eps)
    return _categorical(f, g, rounding) or _bernoulli(f, g, rounding)


def _categorical(f: Tensor, g: Tensor, rounding: float) -> Reading | None:
    """Each row ``c_n (p − e_y)``: one negative entry, and the sum zero; or of a log-softmax, ``−c e_y``."""
    axis = class_axis(f) if f.ndim > 1 else 0
    C = f.shape[axis]
    if f.ndim < 2 or C < 2:
        return None
    F, G = (t.movedim(axis, -1).reshape(-1, C) for t in (f, g))
    there = (G != 0).any(-1).nonzero().squeeze(-1)
    rows, there = len(there), there[:MOST_ROWS]
    F, G = F[there].double(), G[there].double()
    p = F.softmax(-1)
    y = G.argmin(-1, keepdim=True)
    R = p.scatter_add(-1, y, -torch.ones_like(y, dtype=p.dtype))
    if bool((F.logsumexp(-1).abs() < rounding).all()) and bool(((G != 0).sum(-1) == 1).all()):
        R = -torch.zeros_like(R).scatter(-1, y, 1.0)  # log-probabilities
    c = (G * R).sum(-1) / R.square().sum(-1).clamp_min(torch.finfo(R.dtype).tiny)
    missed = (G - c.unsqueeze(-1) * R).square().sum() / G.square().sum()
    if float(missed) > rounding**2 or float((c > 0).double().mean()) < 1:
        return _smoothed(p, G, rows, rounding)
    weight = R.square().sum(-1)  # rows that are nearly right say little of c
    return Reading("categorical", _one(c, weight, rounding), rows)


def _smoothed(p: Float[Tensor, "N C"], G: Float[Tensor, "N C"], rows: int, rounding: float) -> Reading | None:
    """``c (p − (1 − ε) e_y − ε/C)``: labels smoothed by the same ε, the same c for all rows."""
    C = G.shape[-1]
    if C < 3:  # two numbers explain any two
        return None
    y, A, B, c, c_eps = G.argmin(-1), p, p, 0.0, 0.0
    for _ in range(SWEEPS):
        one_hot = torch.nn.functional.one_hot(y, C).to(p)
        A, B = p - one_hot, one_hot - 1 / C
        columns = torch.stack([A.flatten(), B.flatten()], -1)
        c, c_eps = torch.linalg.lstsq(columns, G.flatten().unsqueeze(-1)).solution.flatten().tolist()
        if c <= 0:
            return None
        y = (G / c - p).argmin(-1)  # of a row that is nearly right the least entry of G may be another's
    missed = (G - c * A - c_eps * B).square().sum() / G.square().sum()
    found = 0 < c_eps < c and float(missed) <= rounding**2
    return Reading("categorical", c, rows) if found else None


def _bernoulli(f: Tensor, g: Tensor, rounding: float) -> Reading:
    """Entries ``c (q − y)``: none exceeds c q or falls below ``−c (1 − q)``, and targets of 0 and 1 reach that."""
    F, G = (t.flatten()[: 1000 * MOST_ROWS].double() for t in (f, g))
    q = F.sigmoid()
    inside = (q > 0.02) & (q < 0.98) & (G != 0)
    if int(inside.sum()) < 4:
        return Reading(None, sure=False)
    q, G, F = q[inside], G[inside], F[inside]
    ratio = torch.where(G > 0, G / q, -G / (1 - q))
    reached = ratio > (1 - rounding) * ratio.max()
    if float(reached.double().mean()) < SHARE:
        return Reading(None)
    if float(F.std()) < SPREAD:
        return Reading(None, sure=False)
    return Reading("bernoulli", float(ratio[reached].mean()), len(f))


def _one(c: Float[Tensor, "N"], weight: Float[Tensor, "N"], rounding: float) -> float | None:
    """Their mean, if they are all alike."""
    mean = float((c * weight).sum() / weight.sum())
    spread = float(((c - mean).square() * weight).sum() / weight.sum()) ** 0.5
    return mean if spread <= 5 * rounding * abs(mean) else None


@torch.no_grad()
def draw_some(law: str, f: Tensor) -> Tensor:
    """Labels of two rows, which nobody wants: so that a device has loaded the code when the first batch is due to have
    some, ten steps later perhaps, which would take an H200 some 5 ms.

    >>> draw_some("categorical", torch.zeros(2, 4, 3)).shape  # vectors, of two rows at one position
    torch.Size([2, 1, 3])
    """
    likelihood = likelihoods.resolve(law)
    rows = f.detach().movedim(class_axis(f), -1).flatten(0, -2)[:2] if f.ndim > 1 else f.detach()[:2]
    rows = rows if likelihood.samples_half else as_statistics(rows)
    terms = likelihood.standardize_asked(rows, None, None, lambda t: t, None)
    return likelihood.sample(terms, stream(0, "labels"))


@dataclass
class OutputReader:
    """Reads backwards until the likelihood is known, and holds what was declared of the loss against them."""

    declared: LossScale
    asks: bool
    """Whether the likelihood is to be found."""
    seen: Reading | None = None
    looks: int = 0
    wrong: str | None = None
    settled: bool = False
    """Whether a step was taken with what was seen."""

    @property
    def wants(self) -> bool:
        """Whether another backward is to be read."""
        return self.seen is None and not self.settled

    def forget(self) -> None:
        """What was seen belongs to no step: gradients were thrown away."""
        if not self.settled:
            self.seen = self.wrong = None

    def look(self, f: Tensor, g: Tensor, examples: int, tokens: int) -> None:
        """One backward."""
        found = read(f, g)
        if found is None:
            return
        self.looks += 1
        if found.sure or self.looks >= LOOKS:
            self.seen = found
            self._compare(found, examples, tokens)
            if self.asks and found.law is not None and f.is_cuda:
                with suppress(LayerwiseError):  # whoever draws labels will say what is wrong
                    draw_some(found.law, f)

    def _compare(self, found: Reading, examples: int, tokens: int) -> None:
        """By what the gradient would have to be multiplied, as it was declared and as it came."""
        if found.scale is None or not self.declared.given:
            return
        needed = 1 / found.scale
        said = self.declared.possible(examples, (tokens, max(found.rows, 1)))
        if all(abs(factor / needed - 1) > 0.05 for factor in said):
            words = ", ".join(self.declared.words())
            self.wrong = describe(
                f"{words}, but the gradient at the model's output ({examples} examples, {tokens} positions) is that of "
                f"a sum divided by {needed:g}, not by {' or '.join(f'{factor:g}' for factor in sorted(said))}",
                "a loss that is reduced as was said",
                "leave it out: it is read from the gradient; or mend the loss",
            )

    def check(self) -> None:
        """At a step: raise, once, if the loss is not what was said of it."""
        self.settled = self.seen is not None
        if self.wrong is not None:
            wrong, self.wrong = self.wrong, None
            raise LayerwiseError(wrong)

    def votes(self) -> Tensor:
        """What this process has seen, to be added to what others have: categorical, Bernoulli, neither; c, whether it
        is known, and whether one was looked for and is not."""
        if self.seen is None:
            return torch.zeros(len(LAWS) + 3, dtype=torch.float64)
        law, c = self.seen.law or "empirical", self.seen.scale
        laws = [float(law == name) for name in LAWS]
        return torch.tensor([*laws, c or 0.0, float(c is not None), float(c is None)], dtype=torch.float64)

    @staticmethod
    def decision(votes: Tensor, name: str) -> tuple[str | None, float | None]:
        """Of all processes: the likelihood's name, "empirical" (with a warning), or None: nothing was seen yet; and c,
        a mean over those that have seen something, if all of them know it."""
        *counts, total, known, unknown = votes.tolist()
        c = total / known if known and not unknown else None
        if not any(counts):
            return None, None
        law = LAWS[counts.index(max(counts))]
        if law != "empirical":
            return law, c
        warnings.warn(
            f"{name}: {EMPIRICAL}. The gradient at the model's output is not that of a cross-entropy with one "
            'class or probability as target. Pass likelihood="categorical" if the output holds logits of classes '
            '(mixed targets, a focal loss), "gaussian" for a square loss, or estimator="empirical" to choose this.',
            stacklevel=2,
        )
        return law, c
