"""Theorem 3.5.7 of Wu (2023) on a teacher that has an anchor, and students that are wrong by more and more."""

from dataclasses import dataclass

import numpy as np

from layerwise import theory
from layerwise.theory import DownstreamTransfer, LogLinear

WORDS = (0, 1)
"""The words of interest: they speak for and against the label."""
WEIGHTS = np.array([1.0, -1.0])


@dataclass(frozen=True, kw_only=True, eq=False)
class Student:
    """What a student with noisy contexts does, context by context."""

    conditions: DownstreamTransfer
    divergence: np.ndarray
    distance: np.ndarray
    """Total variation."""
    wrong: np.ndarray
    """Where its label is not the teacher's."""

    def values(self) -> dict[str, float]:
        """Means, the bound, and how far wrong contexts are from what the theorem says is the least."""
        case, wrong = self.conditions, self.wrong

        def least(quantity: np.ndarray, floor: float) -> float:
            return float(quantity[wrong].min() / floor) if wrong.any() else np.inf

        return {
            "anchor error": float(case.error),
            "bulk": float(case.bulk),
            "margin": float(case.margin),
            "conditions": float(case.holds),
            "divergence": float(self.divergence.mean()),
            "wrong": float(wrong.mean()),
            "bound": case.bound(float(self.divergence.mean())),
            "divergence/floor": least(self.divergence, case.divergence_floor),
            "distance/floor": least(self.distance, case.distance_floor),
            "sum/floor": least(2 * self.distance, case.sum_floor),
        }


def teacher(random: np.random.Generator, contexts: int, words: int, width: int) -> LogLinear:
    """Bulk atoms near one vector u; words 0 and 1 are u + e_0 and u + e_1, so that log(p_j/P_bulk) is nearly h_j.

    Half of the contexts have h_0 in [0, 0.7] and h_1 in [−4, −3], and the others the reverse.
    """
    h = random.standard_normal((contexts, width))
    half = contexts // 2
    near, far = random.uniform(0, 0.7, contexts), random.uniform(-4, -3, contexts)
    h[:half, 0], h[:half, 1] = near[:half], far[:half]
    h[half:, 1], h[half:, 0] = near[half:], far[half:]
    u = random.standard_normal(width) / np.sqrt(width)
    v = u + 0.1 * random.standard_normal((words, width)) / np.sqrt(width)
    v[list(WORDS)] = u + np.eye(len(WORDS), width)
    constant = np.zeros((words, 1))
    constant[list(WORDS)] = np.log(words - len(WORDS))
    return LogLinear(contexts=np.hstack([h, np.ones((contexts, 1))]), atoms=np.hstack([v, constant]))


def student(teacher: LogLinear, noise: float | int, random: np.random.Generator) -> Student:
    """The teacher's atoms with noisy contexts: `noise` in the two coordinates of interest, 0.3 of it elsewhere."""
    size = np.full(teacher.contexts.shape[1], 0.3 * noise)
    size[list(WORDS)], size[-1] = noise, 0.0
    disturbed = teacher.contexts + size * random.standard_normal(teacher.contexts.shape)
    follower = LogLinear(contexts=disturbed, atoms=teacher.atoms)
    anchors = [fitted_anchor(model) for model in (teacher, follower)]
    error = max(
        np.abs(m.contexts @ v0 - m.log_bulk(WORDS)).max() for m, v0 in zip((teacher, follower), anchors, strict=True)
    )
    k = len(WORDS)
    thresholds = np.full(k, error - np.log(4 * k))
    labels, guesses = (
        theory.relu_task(m.anchored(WORDS, v0), WEIGHTS, thresholds)
        for m, v0 in zip((teacher, follower), anchors, strict=True)
    )
    bulk = np.exp(teacher.log_bulk(WORDS) - teacher.log_partition).min()
    return Student(
        conditions=DownstreamTransfer(
            words=k,
            margin=np.abs(labels).min() / (k * np.abs(WEIGHTS).max()),
            bulk=bulk,
            error=error,
            least_threshold=thresholds.min(),
        ),
        divergence=theory.word_divergence(teacher, follower),
        distance=theory.word_distance(teacher, follower),
        wrong=labels * guesses < 0,
    )


def fitted_anchor(model: LogLinear) -> np.ndarray:
    """v_0 by least squares on log Z_bulk."""
    return np.linalg.lstsq(model.contexts, model.log_bulk(WORDS), rcond=None)[0]
