"""Least squares over many positions, in float64 and little memory: rows are folded into one triangular matrix."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK = 2048


def folded(rows: Iterable[Float[Tensor, "M c"]]) -> Float[Tensor, "_ c"]:
    """A matrix of at most c rows that has the products (XᵀX) of all rows, by repeated QR.

    It can stand for the data in any least-squares problem. Products XᵀX themselves would square the condition number,
    which matters: single coordinates of hidden states may be a thousand times as large as others.

    >>> import torch
    >>> X = torch.randn(50, 3, dtype=torch.float64)
    >>> R = folded(X.split(20))
    >>> R.shape, torch.allclose(R.mT @ R, X.mT @ X)
    (torch.Size([3, 3]), True)
    """
    R = None
    for part in rows:
        stacked = part.double() if R is None else torch.cat([R, part.double()])
        R = torch.linalg.qr(stacked, mode="r").R
    assert R is not None, "at least one row"
    return R


@dataclass(frozen=True, kw_only=True, eq=False)
class Folded:
    """Positions with columns (states, 1, targets), folded."""

    rows: Float[Tensor, "_ c"]
    positions: int
    width: int
    """Columns of states, which come first; a column of ones follows, then targets."""
    precision: float
    """Of the states: directions whose singular value is below ten times this, relative to the largest, are rounding."""

    @property
    def states(self) -> Float[Tensor, "_ d"]:
        """Rows that stand for the states."""
        return self.rows[:, : self.width]

    @property
    def ones(self) -> Float[Tensor, "_ 1"]:
        """Rows that stand for the constant 1."""
        return self.rows[:, self.width : self.width + 1]

    @property
    def targets(self) -> Float[Tensor, "_ t"]:
        """Rows that stand for the targets."""
        return self.rows[:, self.width + 1 :]

    def mean(self, columns: Float[Tensor, "_ c"]) -> Float[Tensor, "c"]:
        """Over positions."""
        return (self.ones.mT @ columns)[0] / self.positions

    def mean_square(self, residuals: Float[Tensor, "_ t"]) -> Float[Tensor, "t"]:
        """Over positions."""
        return residuals.square().sum(0) / self.positions

    def variance(self) -> Float[Tensor, "t"]:
        """Of the targets."""
        return self.mean_square(self.targets - self.ones * self.mean(self.targets))

    def solve(self, features: Float[Tensor, "_ f"], targets: Float[Tensor, "_ t"]) -> Float[Tensor, "f t"]:
        """Least squares with the smallest coefficients; columns are scaled first, rounding is left out."""
        scale = features.norm(dim=0).clamp_min(torch.finfo(torch.float64).tiny)
        cut = 10 * self.precision
        found = torch.linalg.lstsq(features / scale, targets, rcond=cut, driver="gelsd").solution
        return found / scale[:, None]


def fold(
    states: Float[Tensor, "N d"],
    targets: Float[Tensor, "N t"],
    chosen: Int[Tensor, "M"] | None = None,
) -> Folded:
    """Some positions (by default all) in one triangular matrix."""
    places = torch.arange(len(states)) if chosen is None else chosen

    def part(at: Tensor) -> Tensor:
        return torch.cat([states[at].double(), torch.ones(len(at), 1, dtype=torch.float64), targets[at].double()], 1)

    return Folded(
        rows=folded(part(at) for at in places.split(CHUNK)),
        positions=len(places),
        width=states.shape[1],
        precision=torch.finfo(states.dtype).eps,
    )


def together(parts: Sequence[Folded]) -> Folded:
    """Several sets of positions as one."""
    first = parts[0]
    return Folded(
        rows=folded([part.rows for part in parts]),
        positions=sum(part.positions for part in parts),
        width=first.width,
        precision=first.precision,
    )


def several(
    states: Float[Tensor, "N d"], target: Float[Tensor, "N"], n_anchors: int, rounds: int = 20
) -> Float[Tensor, "a d"]:
    """Anchors in turn with an assignment: each position belongs to the one that predicts it best; no intercept.

    Positions are first split by their targets alone (k-means in one dimension). A part of fewer positions than states
    have coordinates would be fitted exactly, so the last assignment before that is kept.
    """
    group = _split(target, n_anchors)
    anchors = None
    for _ in range(rounds):
        members = [(group == a).nonzero()[:, 0] for a in range(n_anchors)]
        if min(map(len, members)) <= states.shape[1] and anchors is not None:
            break
        solved = []
        for places in members:
            data = fold(states, target[:, None], places) if len(places) else fold(states, target[:, None])
            solved.append(data.solve(data.states, data.targets)[:, 0])
        anchors = torch.stack(solved)
        again = nearest(states, target, anchors)[1]
        if torch.equal(again, group):
            break
        group = again
    assert anchors is not None, "at least one round"
    return anchors


def nearest(
    states: Float[Tensor, "N d"], target: Float[Tensor, "N"], anchors: Float[Tensor, "a d"]
) -> tuple[Float[Tensor, "N"], Int[Tensor, "N"]]:
    """The residual of the anchor that predicts each position best, and which anchor that is."""
    residuals = torch.cat([part.double() @ anchors.mT for part in states.split(CHUNK)]) - target[:, None]
    best = residuals.abs().argmin(1)
    return residuals.gather(1, best[:, None])[:, 0], best


def _split(target: Float[Tensor, "N"], parts: int) -> Int[Tensor, "N"]:
    """k-means in one dimension, from equally spaced centres."""
    spread = torch.linspace(0, 1, 2 * parts + 1, dtype=torch.float64)[1::2]
    centres = target.min() + spread * (target.max() - target.min())
    group = torch.zeros(len(target), dtype=torch.long)
    for _ in range(100):
        again = (target[:, None] - centres).abs().argmin(1)
        if torch.equal(again, group):
            break
        group = again
        for a in range(parts):
            if bool((group == a).any()):
                centres[a] = target[group == a].mean()
    return group
