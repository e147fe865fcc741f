"""Two students that predict words as well as their teacher and fail at its task: section 3.3 of Wu (2023)."""

from collections.abc import Mapping, Sequence

import numpy as np

from layerwise import theory
from layerwise.theory import LogLinear

RARE, FREQUENT = 0, 1


def random_teacher(
    random: np.random.Generator, contexts: int, words: int, width: int, biases: Sequence[float | int] = ()
) -> LogLinear:
    """Gaussian contexts, atoms with variance 1/width, and a last coordinate for biases, here of the first words."""
    h = np.hstack([random.standard_normal((contexts, width)), np.ones((contexts, 1))])
    v = np.hstack([random.standard_normal((words, width)) / np.sqrt(width), np.zeros((words, 1))])
    v[: len(biases), -1] = biases
    return LogLinear(contexts=h, atoms=v)


def rare_words(
    random: np.random.Generator, amounts: Sequence[float | int], *, contexts: int, words: int, width: int
) -> dict[str, float]:
    """Theorem 3.3.1: f* = z_0 + z_1, where word 0 is rare and word 1 frequent; the student's z_0 is less by s."""
    teacher = random_teacher(random, contexts, words, width, biases=(-8.0, 9.0))
    task = teacher.logits[:, [RARE, FREQUENT]].sum(1)
    positive = task > 0
    p = teacher.probabilities[:, RARE]
    values = {"probability": float(p.mean()), "positive": float(positive.mean())}
    for s in amounts:
        student = theory.hide_word(teacher, RARE, s)
        divergence = theory.word_divergence(teacher, student)
        f = student.logits[:, [RARE, FREQUENT]].sum(1)
        values |= {
            f"flipped@{s:g}": float((f < 0)[positive].mean()),
            f"divergence@{s:g}": float(divergence.mean()),
            f"largest divergence@{s:g}": float(divergence.max()),
            f"formula@{s:g}": float(np.abs(divergence - theory.hidden_word_divergence(p, s)).max()),
            f"above s p@{s:g}": float((divergence - s * p).max()),
            f"task@{s:g}": float(np.abs(f - (task - s)).max()),
        }
    return values


def softmax_shift(
    random: np.random.Generator, *, contexts: int, words: int, width: int, deviation: float | int
) -> dict[str, float]:
    """Theorem 3.3.2: all logits shifted below every threshold; and what anchored logits make of random shifts."""
    teacher = random_teacher(random, contexts, words, width)
    a, b = random.standard_normal(words), random.standard_normal(words) / 2
    student = theory.shift_logits(teacher, theory.silencing_shift(teacher, b))
    shifted = theory.shift_logits(teacher, deviation * random.standard_normal(contexts))
    interest = list(range(5))

    def anchored(model: LogLinear) -> np.ndarray:
        return model.logits - model.log_bulk(interest)[:, None]

    task = theory.relu_task(teacher.logits, a, b)
    return {
        "probabilities": float(np.abs(student.log_probabilities - teacher.log_probabilities).max()),
        "teacher's task": float(task.std()),
        "student's task": float(np.abs(theory.relu_task(student.logits, a, b)).max()),
        "plain": float(np.abs(shifted.logits - teacher.logits).max()),
        "anchored": float(np.abs(anchored(shifted) - anchored(teacher)).max()),
        "labels": float(((theory.relu_task(shifted.logits, a, b) > 0) != (task > 0)).mean()),
    }


def as_series(values: Mapping[str, float], name: str, amounts: Sequence[float | int]) -> list[float]:
    """Values of one name over the amounts."""
    return [values[f"{name}@{s:g}"] for s in amounts]
