"""The log-linear word model of Wu (2023), chapter 3: two counter-examples, and when pre-training transfers.

A word j follows a context x with probability exp(⟨h(x), v_j⟩)/Z(x); h(x) is what the output layer of a language model
sees, and the atoms v_j are that layer's rows. A *student* is compared with a *teacher* by E KL(p*‖p), the excess of its
cross-entropy. Where the thesis prints something else, that is there too, as ``printed_…``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from layerwise.foundations.errors import InputError, describe

Array = np.ndarray
Number = float | int | np.floating


@dataclass(frozen=True, kw_only=True, eq=False)
class LogLinear:
    """Contexts and atoms: p_j(x) = exp(⟨h(x), v_j⟩)/Z(x).

    >>> model = LogLinear(contexts=np.zeros((1, 2)), atoms=np.ones((4, 2)))
    >>> model.probabilities
    array([[0.25, 0.25, 0.25, 0.25]])
    """

    contexts: Float[Array, "N d"]
    atoms: Float[Array, "n d"]

    def __post_init__(self) -> None:
        if self.contexts.shape[1] != self.atoms.shape[1]:
            given = f"contexts of width {self.contexts.shape[1]} and atoms of width {self.atoms.shape[1]}"
            raise InputError(describe(given, "one width", "give both as rows of the same length"))
        if not (np.isfinite(self.contexts).all() and np.isfinite(self.atoms).all()):
            raise InputError(describe("contexts or atoms that are not finite", "numbers", "look for NaN and infinity"))

    @cached_property
    def logits(self) -> Float[Array, "N n"]:
        """z_j(x) = ⟨h(x), v_j⟩."""
        return self.contexts @ self.atoms.T

    @cached_property
    def log_partition(self) -> Float[Array, "N"]:
        """log Z(x)."""
        return log_sum_exp(self.logits)

    @cached_property
    def log_probabilities(self) -> Float[Array, "N n"]:
        """log p_j(x)."""
        return self.logits - self.log_partition[:, None]

    @cached_property
    def probabilities(self) -> Float[Array, "N n"]:
        """p_j(x)."""
        return np.exp(self.log_probabilities)

    def log_bulk(self, words: Sequence[int]) -> Float[Array, "N"]:
        """log Z_bulk(x): over all words but these."""
        return log_sum_exp(np.delete(self.logits, list(words), axis=1))

    def anchored(self, words: Sequence[int], anchor: Float[Array, "d"]) -> Float[Array, "N k"]:
        """⟨h(x), v_j − v_0⟩ of some words: logits that a shift of all of them does not change."""
        return self.contexts @ (self.atoms[list(words)] - anchor).T


def log_sum_exp(logits: Float[Array, "N n"]) -> Float[Array, "N"]:
    """log Σ_j exp(z_j), without overflow."""
    most = logits.max(1)
    return most + np.log(np.exp(logits - most[:, None]).sum(1))


def word_divergence(teacher: LogLinear, student: LogLinear) -> Float[Array, "N"]:
    """KL(p*‖p) of each context.

    >>> model = LogLinear(contexts=np.ones((2, 3)), atoms=np.eye(3))
    >>> word_divergence(model, model)
    array([0., 0.])
    """
    log_p, log_q = teacher.log_probabilities, student.log_probabilities
    return (np.exp(log_p) * (log_p - log_q)).sum(1)


def word_distance(teacher: LogLinear, student: LogLinear) -> Float[Array, "N"]:
    """Total variation of each context: half of Σ_j |p*_j − p_j|."""
    return np.abs(teacher.probabilities - student.probabilities).sum(1) / 2


# --- two counter-examples --------------------------------------------------------------------------------------


def hide_word(teacher: LogLinear, word: int, by: Number) -> LogLinear:
    """The student of Theorem 3.3.1: the teacher with the logit of one word less by `by` (one dimension more).

    Any task that depends linearly on that logit changes by `by`, and KL(p*‖p) by no more than `by` × p*(word).

    >>> teacher = LogLinear(contexts=np.ones((1, 2)), atoms=np.array([[0.0, 0.0], [5.0, 0.0]]))
    >>> (hide_word(teacher, 0, by=10).logits - teacher.logits).round(12)
    array([[-10.,   0.]])
    """
    if not 0 <= word < len(teacher.atoms) or not by > 0:
        given = f"word {word} of {len(teacher.atoms)}, by={by}"
        raise InputError(describe(given, "a word of the vocabulary and a number > 0", "correct them"))
    column = np.zeros((len(teacher.atoms), 1))
    column[word] = -by
    return _widened(teacher, np.ones(len(teacher.contexts)), column)


def hidden_word_divergence(probability: Float[Array, "*shape"] | Number, by: Number) -> Float[Array, "*shape"] | Number:
    """KL(p*‖p) of `hide_word`, exactly: s p + log(1 − p (1 − e^(−s))), which is at most s p.

    >>> bool(hidden_word_divergence(0.3, by=2.0) <= 2.0 * 0.3)
    True
    """
    with np.errstate(divide="ignore"):  # p = 0 and p = 1 have no divergence
        return np.logaddexp(by * probability + np.log1p(-probability), by * (probability - 1) + np.log(probability))


def printed_hidden_word_divergence(
    probability: Float[Array, "*shape"] | Number, by: Number
) -> Float[Array, "*shape"] | Number:
    """What (B.9) of the thesis prints as more than that divergence: s p log(1/(1 − p)). It is less.

    >>> bool(printed_hidden_word_divergence(0.01, by=2.0) < hidden_word_divergence(0.01, by=2.0))
    True
    """
    return -by * probability * np.log1p(-probability)


def shift_logits(teacher: LogLinear, shift: Float[Array, "N"] | Number) -> LogLinear:
    """All logits of a context more by `shift`, one number or one a context: probabilities are the same.

    >>> teacher = LogLinear(contexts=np.ones((1, 2)), atoms=np.eye(2))
    >>> shift_logits(teacher, -3.0).logits
    array([[-2., -2.]])
    """
    shifts = np.broadcast_to(np.asarray(shift, dtype=float), (len(teacher.contexts),))
    return _widened(teacher, shifts, np.ones((len(teacher.atoms), 1)))


def silencing_shift(teacher: LogLinear, thresholds: Float[Array, "n"]) -> float:
    """τ of Theorem 3.3.2: with all logits more by this (negative) number no ReLU of `relu_task` is active."""
    return float(thresholds.min() - teacher.logits.max() - 1)


def relu_task(
    logits: Float[Array, "N k"], weights: Float[Array, "k"], thresholds: Float[Array, "k"]
) -> Float[Array, "N"]:
    """f(x) = Σ_j a_j relu(z_j − b_j), whose sign is the label; `logits` are plain (3.5) or anchored (3.7).

    >>> relu_task(np.array([[2.0, 5.0]]), np.array([1.0, -1.0]), np.array([1.0, 5.0]))
    array([1.])
    """
    return np.maximum(logits - thresholds, 0) @ weights


def _widened(model: LogLinear, context: Array, atom: Array) -> LogLinear:
    return LogLinear(
        contexts=np.hstack([model.contexts, context[:, None]]),
        atoms=np.hstack([model.atoms, atom]),
    )


# --- the main theorem ------------------------------------------------------------------------------------------


class Condition(NamedTuple):
    """An assumption of the theorem, and whether it holds."""

    text: str
    holds: bool


@dataclass(frozen=True, kw_only=True)
class DownstreamTransfer:
    """Theorem 3.5.7: how wrong a student's labels can be, given its divergence from the teacher.

    The label is the sign of f*(x) = Σ_j a_j relu(⟨h*, v*_j − v*_0⟩ − b_j) over k words; the student has the same a
    and b and its own h, v_j and v_0. Everything is said of *each* context with a wrong label; the bound on the share of
    wrong labels follows by averaging, and is loose: for models of some hundred words it is above 1.

    >>> case = DownstreamTransfer(words=2, margin=1.0, bulk=0.3, error=0.01, least_threshold=-2.0)
    >>> case.holds, case.divergence_floor < 2 * case.distance_floor**2
    (True, True)
    """

    words: int
    """k, words of interest; none of them is in the bulk."""
    margin: Number
    """Γ = min|f*| / (k max|a|)."""
    bulk: Number
    """p_b: the least Z_bulk/Z of the teacher."""
    error: Number
    """ε_b: the largest |⟨h, v_0⟩ − log Z_bulk|, of teacher and student."""
    least_threshold: Number
    """min b_j."""
    shift: Number = 1.0
    """μ: the density of pre-training texts is at least μ times that of the task's."""

    def __post_init__(self) -> None:
        if self.words < 1 or not self.margin > 0 or not 0 < self.bulk <= 1 or self.error < 0 or not 0 < self.shift <= 1:
            raise InputError(describe(repr(self), "k ≥ 1, Γ > 0, p_b and μ in (0, 1], ε_b ≥ 0", "correct them"))

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Of the theorem, which is proved for 8 ε_b < Γ < 6."""
        least = self.error - math.log(4 * self.words)
        return (
            Condition("min b ≥ ε_b − log 4k", bool(self.least_threshold >= least - 1e-12 * abs(least))),
            Condition("8 ε_b < Γ", bool(8 * self.error < self.margin)),
            Condition("Γ < 6", bool(self.margin < 6)),
        )

    @property
    def holds(self) -> bool:
        """Whether all conditions do."""
        return all(condition.holds for condition in self.conditions)

    @property
    def room(self) -> float:
        """Λ = Γ/2 − 2 ε_b: what is left of the margin."""
        return float(self.margin / 2 - 2 * self.error)

    @property
    def divergence_floor(self) -> float:
        """KL(p*‖p) of a context with a wrong label is at least p_b² Γ²/288."""
        return float((self.bulk * self.margin) ** 2 / 288)

    def bound(self, divergence: Number) -> float:
        """The largest share of wrong labels at that mean divergence: (3.10)."""
        return float(divergence / (self.shift * self.divergence_floor))

    @property
    def distance_floor(self) -> float:
        """Total variation of a context with a wrong label is at least this: Lemma 3.5.9 with max in place of the sum.

        min over e of max{1 − exp(−e), k exp(min b − ε_b − e) (exp(relu(Λ − e)) − 1)}, times p_b. In x = exp(−e) the
        two terms are 1 − x and c (exp(Λ) x² − x), which meet at the positive root of a quadratic.
        """
        if self.room <= 0:
            return 0.0
        c, grown = self._weight, math.exp(self.room)
        root = math.sqrt((1 - c) ** 2 + 4 * c * grown)
        x = 2 / (1 - c + root) if c < 1 else (c - 1 + root) / (2 * c * grown)  # the same, without a difference
        return float(self.bulk * (1 - x))

    @property
    def sum_floor(self) -> float:
        """Σ_j |p*_j − p_j|, twice the total variation, is at least this: Lemma 3.5.9 as its proof has it."""
        if self.room <= 0:
            return 0.0
        c, grown = self._weight, math.exp(self.room)
        x = min(max((1 + c) / (2 * c * grown), 1 / grown), 1.0)
        return float(self.bulk * (1 - (1 + c) * x + c * grown * x**2))

    @property
    def _weight(self) -> float:
        return self.words * math.exp(min(max(self.least_threshold - self.error, -300), 300))  # as good as 0 and ∞
