"""Where chapter 3 of Wu (2023) errs: each printed step and its correction, on a random instance.

Every function returns by how much either reading is wrong, relative to what it is about: zero for one that holds.
"""

from dataclasses import replace

import numpy as np

from layerwise import theory
from layerwise.studies.anchor_vectors import downstream
from layerwise.studies.anchor_vectors.counter_examples import random_teacher
from layerwise.studies.feature_learning.errata import Readings
from layerwise.theory import DownstreamTransfer

Random = np.random.Generator


def _short(found: np.ndarray, least: np.ndarray) -> float:
    """By how much, at most, something is below what is said to be its least value."""
    return float(np.max(np.maximum(least - found, 0) / np.abs(least)))


def hidden_word(random: Random) -> Readings:
    """(B.8) and (B.9): the divergence of a student whose logit of one word is less by s.

    >>> found = hidden_word(np.random.default_rng(0))
    >>> found.printed > 0.1, found.corrected < 1e-9
    (True, True)
    """
    teacher = random_teacher(random, 100, 20, 4)
    s = float(random.uniform(1, 4))
    truth = theory.word_divergence(teacher, theory.hide_word(teacher, 0, s))
    p = teacher.probabilities[:, 0]
    printed = _short(np.asarray(theory.printed_hidden_word_divergence(p, s)), truth)
    return Readings(printed=printed, corrected=float(np.max(np.abs(theory.hidden_word_divergence(p, s) / truth - 1))))


def two_distances(random: Random) -> Readings:
    """(3.36) and (3.37): the changes of the bulk and of words of interest, and the distance that holds them both.

    The proof is about Σ|p* − p|, and goes on with half of that; half of it holds the larger of the two changes.
    """
    teacher = downstream.teacher(random, 500, 100, 8)
    noisy = teacher.contexts + random.standard_normal(teacher.contexts.shape) * np.r_[1.0, 1.0, np.zeros(7)]
    student = replace(teacher, contexts=noisy)
    distance = theory.word_distance(teacher, student)
    words = list(downstream.WORDS)
    bulk = np.abs(np.exp(teacher.log_bulk(words) - teacher.log_partition) - _bulk(student))
    change = np.abs(teacher.probabilities - student.probabilities)[:, 0]
    corrected = max(_short(2 * distance, bulk + change), _short(distance, np.maximum(bulk, change)))
    return Readings(printed=_short(distance, bulk + change), corrected=corrected)


def _bulk(model: theory.LogLinear) -> np.ndarray:
    return np.exp(model.log_bulk(downstream.WORDS) - model.log_partition)


def two_cases(random: Random) -> Readings:
    """The cases ε_p ≤ Λ/3 and ε_p > Λ/3 before (3.20), each with the bound that it is said to give."""
    room = random.uniform(0.5, 3, 100)
    below, above = room / 3 * random.uniform(0, 1, 100), room / 3 * random.uniform(1, 3, 100)

    def bulk(e: np.ndarray) -> float:
        return _short(1 - np.exp(-e), 1 - np.exp(-room / 3))

    def words(e: np.ndarray) -> float:
        return _short(np.exp(-e) * np.expm1(room - e), np.sinh(room / 3))

    return Readings(printed=max(bulk(below), words(above)), corrected=max(bulk(above), words(below)))


def hyperbolic_sine(random: Random) -> Readings:
    """exp(−Λ/3) (exp(2Λ/3) − 1), which is displayed as sinh(Λ/3)."""
    room = random.uniform(0.5, 3, 100)
    truth = np.exp(-room / 3) * np.expm1(2 * room / 3)
    printed, corrected = (float(np.max(np.abs(c * np.sinh(room / 3) / truth - 1))) for c in (1, 2))
    return Readings(printed=printed, corrected=corrected)


def condition(random: Random) -> Readings:
    """Remark 3.5.8's 4 ε_b < Γ < 3, and the theorem's 8 ε_b < Γ < 6: does p_b² Γ²/288 follow from the distance?"""

    def worst(times: float, limit: float) -> float:
        margins = random.uniform(0.2, limit, 100)
        errors = margins / times * random.uniform(0.9, 0.999, 100)
        cases = [
            DownstreamTransfer(words=2, margin=m, bulk=0.3, error=e, least_threshold=e - np.log(8))
            for m, e in zip(margins, errors, strict=True)
        ]
        distances = np.array([2 * case.distance_floor**2 for case in cases])
        return _short(distances, np.array([case.divergence_floor for case in cases]))

    return Readings(printed=worst(4.0, 3.0), corrected=worst(8.0, 6.0))


def task(random: Random) -> Readings:
    """Assumption 3.5.1's f*, of plain logits, and (3.7)'s, of anchored ones, when logits of contexts are shifted."""
    teacher = downstream.teacher(random, 300, 50, 6)
    shifted = theory.shift_logits(teacher, 2 * random.standard_normal(300))
    words, anchor = list(downstream.WORDS), downstream.fitted_anchor(teacher)
    bulk = np.log(len(teacher.atoms) - len(words))

    def change(logits: list[np.ndarray], threshold: float) -> float:
        before, after = (theory.relu_task(z, downstream.WEIGHTS, np.full(2, threshold)) for z in logits)
        return float(np.linalg.norm(after - before) / np.linalg.norm(before))

    plain = [model.logits[:, words] for model in (teacher, shifted)]
    anchored = [teacher.anchored(words, anchor), shifted.anchored(words, np.append(anchor, 1.0))]
    return Readings(printed=change(plain, bulk - 2), corrected=change(anchored, -2.0))


def cross_entropy(random: Random) -> Readings:
    """The pre-training loss: with a p* inside the expectation over words, or without."""
    teacher, student = (random_teacher(random, 100, 20, 4) for _ in range(2))
    p, log_p, log_q = teacher.probabilities, teacher.log_probabilities, student.log_probabilities
    truth = float(theory.word_divergence(teacher, student).mean() - (p * log_p).sum(1).mean())
    printed, corrected = (float((weight * -log_q).sum(1).mean()) for weight in (p * p, p))
    return Readings(printed=abs(printed / truth - 1), corrected=abs(corrected / truth - 1))
