"""What was found: for each k how well ⟨h, v_0⟩ predicts log Z_bulk, beside what predicts it without learning a word."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

HARDLY_VARIES = 0.02
"""A standard deviation of log Z_bulk below which nobody need predict it: a constant is right to 2 %."""
AS_RANDOM = 2.0
"""So many times the standard deviation that random atoms give is still nothing to speak of."""
PREDICTED = 0.8
"""Held-out R² from which on log Z_bulk counts as predicted."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Least squares on one half of the positions, tested on the other."""

    mse: float
    """In-sample: fitted on all positions, as the thesis has it."""
    heldout_mse: float
    r2: float
    """1 − held-out MSE / variance of the held-out half; 0 or less is no better than the right constant."""
    p99_error: float
    """Of the absolute errors on the held-out half."""
    max_error: float
    """The same; what the theorem calls ε_b, so far as these positions show it."""


@dataclass(frozen=True, kw_only=True)
class AnchorRow:
    """One k: the bulk is all words but the k likeliest."""

    k: int
    mean: float
    """Of log Z_bulk."""
    variance: float
    """What a constant leaves; always to be read beside an MSE."""
    bulk_probability: float
    """Z_bulk/Z, mean over positions."""
    least_bulk_probability: float
    """p_b of the theorem, so far as these positions show it."""
    anchor: Fit
    """⟨h, v_0⟩, no intercept: the thesis's check."""
    with_intercept: Fit
    """⟨h, v_0⟩ + c. A trained layer norm contains an intercept; one without bias, or an RMS norm, does not."""
    mean_atom: float
    """Held-out R² of ⟨h, mean atom⟩ + c: no anchor is fitted, only the constant."""
    mean_atom_slope: float
    """Least squares of log Z_bulk on ⟨h, mean atom⟩ and 1: near 1 if the mean atom is an anchor."""
    mean_state: float
    """Held-out R² of a ⟨h, mean h⟩ + c: two numbers are fitted."""
    shuffled_positions: float
    """Held-out R² with an intercept when states are given targets of other positions: what chance finds."""
    several: Fit | None = None
    """With n_anchors > 1: each position with the anchor that predicts it best, *chosen by its target*."""
    several_shuffled: float = math.nan
    """Held-out R² of the same with targets of other positions: what that choice alone gives."""


@dataclass(frozen=True, kw_only=True)
class Cone:
    """How atoms lie: on a sphere, or in a cone."""

    norm: float
    norm_deviation: float
    cosine: float
    """Mean over random pairs; 0 for atoms all around."""
    cosine_deviation: float
    first_direction: float
    """Share of the first singular direction in the squared Frobenius norm."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AnchorReport:
    """An output embedding's anchors, with controls; print it for a table and a reading of it."""

    rows: Mapping[int, AnchorRow]
    """By k."""
    controls: Mapping[str, Mapping[int, AnchorRow]]
    """The same for other dictionaries on the same states: "gaussian" (random atoms of the same norms) and "shuffled"
    (every coordinate in another order over the words: mean atom and marginals stay, words do not)."""
    anchors: Mapping[int, Float[Tensor, "a d"]]
    """v_0 by k, fitted on all positions without an intercept; rows are anchors. With a bias in the head, the last
    coordinate is what multiplies the 1."""
    cone: Cone
    positions: int
    width: int
    """Coordinates of a state, the 1 of a bias included."""
    words: int
    perplexity: float
    """Of the next token at these positions; NaN where the corpus is no running text."""

    def verdict(self, k: int | None = None) -> str:
        """One sentence on one k, by default the largest."""
        row = self.rows[max(self.rows) if k is None else k]
        random = self.controls.get("gaussian", {}).get(row.k)
        deviation, r2 = math.sqrt(row.variance), row.with_intercept.r2
        usual = 0.0 if random is None else math.sqrt(random.variance)
        if deviation <= HARDLY_VARIES:
            beside = f"; with random atoms of the same norms {usual:.2g}" if random else ""
            return (
                f"k={row.k}: nothing to find. log Z_bulk hardly varies (standard deviation {deviation:.2g}{beside}): a "
                "constant predicts it."
            )
        if deviation <= AS_RANDOM * usual:
            return (
                f"k={row.k}: nothing to find. log Z_bulk varies little more than with random atoms of the same norms "
                f"(standard deviation {deviation:.2g}, against {usual:.2g})."
            )
        if r2 < PREDICTED:
            return f"k={row.k}: no anchor. ⟨h, v_0⟩ + c leaves a held-out R² of {r2:.3f}."
        found = f"k={row.k}: an anchor, held-out R² {r2:.4f} (largest error {row.with_intercept.max_error:.2g})"
        shuffled = self.controls.get("shuffled", {}).get(row.k)
        if shuffled and shuffled.with_intercept.r2 >= r2 - 0.01 and shuffled.variance >= row.variance / 4:
            return (
                f"{found}. It says how atoms lie, not that words were learned: a dictionary shuffled over words has "
                f"{shuffled.with_intercept.r2:.4f}, and the mean atom alone has {row.mean_atom:.3f}."
            )
        return f"{found}; the mean atom alone has R² {row.mean_atom:.3f}."

    def remarks(self) -> list[str]:
        """What to be careful about."""
        found = []
        if self.positions < 10 * self.width:
            found.append(
                f"{self.positions // 2} positions for {self.width} unknowns: in-sample errors are too small, and "
                "held-out ones too large; give more text."
            )
        return found

    def __str__(self) -> str:
        head = f"{self.positions} positions, {self.words} words, width {self.width}"
        if not math.isnan(self.perplexity):
            head += f", perplexity {self.perplexity:.4g}"
        cone = self.cone
        atoms = (
            f"atoms: norm {cone.norm:.3g} ± {cone.norm_deviation:.2g}, cosine of pairs {cone.cosine:.2f} ± "
            f"{cone.cosine_deviation:.2f}, first direction {100 * cone.first_direction:.0f} %"
        )
        names = ("dictionary", "k", "variance", "MSE", "held-out", "R²", "R² + c", "max", "mean atom", "mean h", "p_b")
        lines = [head, atoms, "", _line(names)]
        for name, rows in {"its own": self.rows, **self.controls}.items():
            lines += [_line((name, *_numbers(row))) for row in rows.values()]
        several = [
            f"k={row.k}: the better of {len(self.anchors[row.k])} anchors leaves R² {row.several.r2:.4f} held out "
            f"(positions shuffled: {row.several_shuffled:.4f}); the choice is made by the target"
            for row in self.rows.values()
            if row.several
        ]
        return "\n".join([*lines, "", *several, *(self.verdict(k) for k in self.rows), *self.remarks()])


def _numbers(row: AnchorRow) -> tuple[str, ...]:
    fit = row.anchor
    own = (row.variance, fit.mse, fit.heldout_mse, fit.r2, row.with_intercept.r2, fit.max_error, row.mean_atom)
    return (str(row.k), *(f"{x:.4g}" for x in own), f"{row.mean_state:.3f}", f"{row.bulk_probability:.2g}")


def _line(words: tuple[str, ...]) -> str:
    return words[0].ljust(11) + "".join(word.rjust(11) for word in words[1:])
