"""Step sizes for least squares, learned by training loss or by validation loss: Wu (2023), section 5.4.

A task is a set of examples; gradient descent from 0 makes t steps on ½‖Xw − y‖²/n. Train-by-train asks which step size
has the least training loss at the end, averaged over tasks; train-by-validation, which has the least loss on examples
that were held out. A run whose weights reach a limit is frozen there (footnote 3), so that step sizes which diverge on
a few tasks can be compared.

Each task is decomposed once. In the basis of its singular vectors t steps are t elementwise operations, so that all
tasks and all step sizes are run as one tensor program.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown
from layerwise.meta.checks import Number, finite, step_sizes, whole

BY = ("train", "validation")
TRUNCATE = 40.0
"""Weights are frozen when their norm is so many times the noise σ."""


class LearnedStep(NamedTuple):
    """The step size of least meta-objective, and the meta-objective of all."""

    eta: float
    objective: Float[Tensor, "E"]


@dataclass(frozen=True, eq=False)
class Descent:
    """What t steps from 0 end at, for every task and step size."""

    weights: Float[Tensor, "m E d"]
    train_loss: Float[Tensor, "m E"]
    """½ mean (y − ⟨w, x⟩)² on the examples that were trained on; ∞ where it overflowed."""
    validation_loss: Float[Tensor, "m E"] | None
    """The same on those that were held out, where there are any."""
    truncated: Bool[Tensor, "m E"]
    """Runs that were frozen at the limit."""


@dataclass(frozen=True, eq=False)
class LeastSquares:
    """Tasks of one size: training examples, and examples held out for validation where there are any.

    >>> tasks = LeastSquares.draw(tasks=10, n=20, d=40, noise=2.0, generator=torch.Generator().manual_seed(0))
    >>> etas = torch.logspace(-4, 0, 25)
    >>> by_train = tasks.learn_step(etas, steps=40, by="train")
    >>> by_validation = tasks.split(10).learn_step(etas, steps=40, by="validation")
    >>> by_validation.eta < 0.1 * by_train.eta  # it does not fit the noise
    True
    """

    x: Float[Tensor, "m n d"]
    y: Float[Tensor, "m n"]
    x_valid: Float[Tensor, "m n2 d"] | None = None
    y_valid: Float[Tensor, "m n2"] | None = None
    limit: Number | None = None
    """Norm of the weights at which a run is frozen, to a vector of that norm; None: never."""
    truth: Float[Tensor, "m d"] | None = None
    """The weights that made the labels, where they are known."""

    def __post_init__(self) -> None:
        given = [t for t in (self.x, self.y, self.x_valid, self.y_valid, self.truth) if t is not None]
        kinds = {str(t.dtype) if isinstance(t, Tensor) else type(t).__name__ for t in given}
        if len(kinds) > 1 or not isinstance(self.x, Tensor) or not self.x.is_floating_point():
            wanted = "floating-point tensors of one precision"
            raise InputError(describe(" and ".join(sorted(kinds)), wanted, "pass e.g. torch.as_tensor(x).double()"))
        for x, y, name in ((self.x, self.y, "x, y"), (self.x_valid, self.y_valid, "x_valid, y_valid")):
            if (x is None) != (y is None):
                raise InputError(describe(f"one of {name} alone", "both or none", "give inputs with their labels"))
            if x is None or y is None:
                continue
            same = x.ndim == 3 and x.shape[:2] == y.shape and (x.shape[0], x.shape[2]) == self.x.shape[::2]
            if not same or 0 in x.shape:
                given = f"{name} of shapes {tuple(x.shape)}, {tuple(y.shape)}"
                raise InputError(
                    describe(given, "[tasks, n ≥ 1, d] and [tasks, n], alike in tasks and d", "stack the tasks")
                )
            finite(x, name)
            finite(y, name)
        if self.truth is not None and self.truth.shape != self.x.shape[::2]:
            given = f"truth of shape {tuple(self.truth.shape)} for x {tuple(self.x.shape)}"
            raise InputError(describe(given, "one vector a task, [tasks, d]", "stack the tasks"))
        if self.limit is not None and not self.limit > 0:
            raise InputError(
                describe(f"limit={self.limit}", "a norm > 0, or None", f"pass {TRUNCATE:g} times the noise")
            )

    @classmethod
    def draw(
        cls,
        *,
        tasks: int,
        n: int,
        d: int,
        noise: Number,
        truncate: Number | None = TRUNCATE,
        generator: torch.Generator | None = None,
    ) -> LeastSquares:
        """Tasks of section 5.4: w* uniform on the unit sphere, x ~ N(0, I), y = ⟨w*, x⟩ + N(0, σ²), in float64.

        Args:
            tasks: m.
            n: examples of each; `split` holds some of them out.
            d: dimension.
            noise: σ.
            truncate: runs are frozen at this many times σ (40 in the thesis); None, never.
            generator: of the draws; what it draws for one noise it draws for every noise.
        """
        for value, name in ((tasks, "tasks"), (n, "n"), (d, "d")):
            whole(value, name)
        if not 0 <= noise < float("inf"):
            raise InputError(describe(f"noise={noise}", "a finite σ ≥ 0", "pass e.g. noise=1.0"))
        kind = {"generator": generator, "dtype": torch.float64}
        truth = torch.randn(tasks, d, **kind)
        truth = truth / truth.norm(dim=1, keepdim=True)
        x = torch.randn(tasks, n, d, **kind)
        y = (x @ truth[..., None])[..., 0] + noise * torch.randn(tasks, n, **kind)
        limit = truncate * noise if truncate is not None and noise > 0 else None
        return cls(x, y, limit=limit, truth=truth)

    def split(self, n: int) -> LeastSquares:
        """The same tasks with the first n examples to train on and the others for validation."""
        if whole(n, "n") >= self.x.shape[1]:
            given = f"n={n} of {self.x.shape[1]} examples"
            raise InputError(describe(given, "at least one to train on and one for validation", "take about half"))
        held: dict[str, Tensor] = {"x_valid": self.x[:, n:], "y_valid": self.y[:, n:]}
        return replace(self, x=self.x[:, :n], y=self.y[:, :n], **held)

    def with_noise_times(self, factor: Number) -> LeastSquares:
        """The same inputs, signal and draws with `factor` times the noise and the limit; decomposed no second time."""
        if self.truth is None or not 0 < factor < float("inf"):
            given = f"factor={factor}" if self.truth is not None else "tasks whose true weights are not known"
            raise InputError(describe(given, "a finite factor > 0, and tasks that were drawn", "pass e.g. 2.0"))

        def louder(x: Tensor, y: Tensor) -> Tensor:
            assert self.truth is not None, "refused above"
            signal = (x @ self.truth[..., None])[..., 0]
            return signal + factor * (y - signal)

        held = None if self.x_valid is None or self.y_valid is None else louder(self.x_valid, self.y_valid)
        limit = None if self.limit is None else factor * self.limit
        found = replace(self, y=louder(self.x, self.y), y_valid=held, limit=limit)
        vars(found)["_svd"] = self._svd
        return found

    def descend(self, etas: Number | Tensor, steps: int) -> Descent:
        """t steps of gradient descent from 0, on all tasks and with all step sizes at once."""
        eta, steps = step_sizes(etas).to(self.x).reshape(-1), whole(steps, "steps")
        lam, V, b, rest = self._spectrum  # coordinates along V: a ← a − η (λa − g)
        g = (lam / self.x.shape[1]).sqrt() * b
        shrink, pull = 1 - eta[:, None] * lam[:, None], eta[:, None] * g[:, None]
        a = torch.zeros_like(pull)
        frozen = torch.zeros(a.shape[:2], dtype=torch.bool, device=a.device)
        if self.limit is not None:
            # Along the largest eigenvector, where a run that diverges goes anyway.
            end = torch.zeros_like(g).index_fill_(1, torch.tensor([lam.shape[1] - 1], device=a.device), self.limit)
        for _ in range(steps):
            a = shrink * a + pull
            if self.limit is not None:
                frozen = frozen | ~(a.norm(dim=2) < self.limit)
                a = torch.where(frozen[..., None], end[:, None], a)
        n = self.x.shape[1]
        residual = b[:, None] - (lam * n).sqrt()[:, None] * a
        weights = a @ V.mT
        return Descent(
            weights=weights,
            train_loss=_or_infinite((residual.square().sum(2) + rest[:, None]) / (2 * n)),
            validation_loss=None if self.x_valid is None else _or_infinite(self._held_out(weights)),
            truncated=frozen,
        )

    def objective(self, etas: Number | Tensor, steps: int, by: str = "validation") -> Float[Tensor, "E"]:
        """The meta-objective: train-by-train (5.3) or train-by-validation (5.4), the mean over tasks."""
        if by not in BY:
            raise NameLookupError(unknown("meta-objective", by, BY))
        if by == "validation" and self.x_valid is None:
            given = "tasks without validation data, by='validation'"
            raise InputError(describe(given, "examples that were held out", "call tasks.split(n // 2) first"))
        found = self.descend(etas, steps)
        losses = found.train_loss if by == "train" else found.validation_loss
        assert losses is not None, "refused above"
        return losses.mean(0)

    def learn_step(self, etas: Number | Tensor, steps: int, by: str = "validation") -> LearnedStep:
        """The step size of a grid that the meta-objective prefers; of equal ones the smallest."""
        grid = step_sizes(etas).reshape(-1).sort().values
        objective = self.objective(grid, steps, by)
        if bool(torch.isinf(objective).all()):
            given = f"step sizes from {float(grid[0]):g} on, all of which diverge on some task"
            raise InputError(describe(given, "one with a finite meta-objective", "take smaller ones, or set a limit"))
        return LearnedStep(float(grid[objective.argmin()]), objective)

    def error(self, weights: Float[Tensor, "m E d"]) -> Float[Tensor, "m E"]:
        """‖w − w*‖², where the labels' weights are known; the loss on new examples is half of it plus σ²/2."""
        if self.truth is None:
            given = "tasks whose true weights are not known"
            raise InputError(describe(given, "tasks with truth=", "judge by the loss on held-out examples instead"))
        return (weights - self.truth[:, None]).square().sum(2)

    @property
    def eigenvalues(self) -> Float[Tensor, "m r"]:
        """Those of XᵀX/n that are not zero, ascending: min(n, d) of each task."""
        return self._spectrum[0]

    @cached_property
    def _svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """U [m, n, r], singular values [m, r] and V [m, d, r], ascending."""
        U, S, Vh = torch.linalg.svd(self.x, full_matrices=False)
        return U.flip(2), S.flip(1), Vh.mT.flip(2)

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """λ [m, r], right singular vectors V [m, d, r], labels Uᵀy [m, r], and ‖y − UUᵀy‖² [m]."""
        U, S, V = self._svd
        b = (U.mT @ self.y[..., None])[..., 0]
        outside = (self.y - (U @ b[..., None])[..., 0]).square().sum(1)
        # With r = n nothing is outside; what is left of rounding would hide how small a training loss is.
        rest = outside if self.x.shape[1] > S.shape[1] else torch.zeros_like(outside)
        return S.square() / self.x.shape[1], V, b, rest

    def _held_out(self, weights: Tensor) -> Tensor:
        assert self.x_valid is not None, "asked for only if there are any"
        assert self.y_valid is not None, "given with the inputs"
        return 0.5 * (self.y_valid[..., None] - self.x_valid @ weights.mT).square().mean(1)


def _or_infinite(loss: Tensor) -> Tensor:
    return torch.where(torch.isfinite(loss), loss, torch.inf)
