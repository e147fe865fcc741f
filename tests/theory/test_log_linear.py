"""The log-linear word model: its divergences against a direct sum, both counter-examples, floors against a search."""

import numpy as np
import pytest

from error_sentences import WORDED
from layerwise import theory
from layerwise.foundations.errors import InputError
from layerwise.theory import DownstreamTransfer, LogLinear


def drawn(seed: int = 0, contexts: int = 40, words: int = 12, width: int = 5) -> LogLinear:
    rng = np.random.default_rng(seed)
    return LogLinear(contexts=rng.standard_normal((contexts, width)), atoms=rng.standard_normal((words, width)))


def test_probabilities_and_distances_are_those_of_plain_sums():
    teacher, student = drawn(0), LogLinear(contexts=drawn(0).contexts, atoms=drawn(1).atoms)
    p, q = (np.exp(m.logits) / np.exp(m.logits).sum(1, keepdims=True) for m in (teacher, student))
    assert np.allclose(teacher.probabilities, p, rtol=1e-13)
    assert np.allclose(theory.word_divergence(teacher, student), (p * np.log(p / q)).sum(1), rtol=1e-12)
    assert np.allclose(theory.word_distance(teacher, student), np.abs(p - q).sum(1) / 2, rtol=1e-12)
    assert np.allclose(teacher.log_bulk([0, 3]), np.log(np.exp(np.delete(teacher.logits, [0, 3], 1)).sum(1)))
    far = LogLinear(contexts=1e3 * teacher.contexts, atoms=teacher.atoms)
    assert np.isfinite(far.log_partition).all()


@pytest.mark.parametrize("by", [0.5, 10.0])
def test_a_hidden_word_costs_what_the_formula_says(by):
    teacher = drawn()
    student = theory.hide_word(teacher, 4, by)
    p = teacher.probabilities[:, 4]
    divergence = theory.word_divergence(teacher, student)
    assert np.abs(divergence - theory.hidden_word_divergence(p, by)).max() < 1e-12
    assert (divergence <= by * p + 1e-13).all()
    assert (divergence > theory.printed_hidden_word_divergence(p, by)).any()  # what (B.9) prints is no bound
    change = student.logits - teacher.logits
    assert np.allclose(change[:, 4], -by)
    assert np.allclose(np.delete(change, 4, 1), 0)


def test_a_shift_silences_the_task_and_changes_no_probability():
    teacher = drawn()
    a, b = np.linspace(-1, 1, 12), np.full(12, -0.3)
    student = theory.shift_logits(teacher, theory.silencing_shift(teacher, b))
    assert np.abs(student.log_probabilities - teacher.log_probabilities).max() < 1e-13
    assert np.abs(theory.relu_task(teacher.logits, a, b)).max() > 0.1
    assert (theory.relu_task(student.logits, a, b) == 0).all()


def test_floors_are_the_least_over_all_bulk_errors():
    rng = np.random.default_rng(0)
    e = np.linspace(0, 6, 60_001)
    for _ in range(6):
        case = DownstreamTransfer(
            words=int(rng.integers(1, 5)),
            margin=float(rng.uniform(0.2, 5)),
            bulk=float(rng.uniform(0.1, 1)),
            error=0.01,
            least_threshold=float(rng.uniform(-1.2, 1)),
        )
        top = 1 - np.exp(-e)
        words = case.words * np.exp(case.least_threshold - 0.01 - e) * np.expm1(np.maximum(case.room - e, 0))
        assert case.distance_floor == pytest.approx(case.bulk * np.maximum(top, words).min(), abs=1e-3, rel=1e-3)
        assert case.sum_floor == pytest.approx(case.bulk * (top + words).min(), abs=1e-3, rel=1e-3)
        if case.holds:
            assert case.divergence_floor <= 2 * case.distance_floor**2


def test_conditions_and_bound():
    case = DownstreamTransfer(words=2, margin=1.0, bulk=0.5, error=0.1, least_threshold=0.1 - np.log(8), shift=0.5)
    assert case.holds
    assert case.bound(0.01) == pytest.approx(0.01 * 288 / (0.5 * 0.25))
    assert not DownstreamTransfer(words=2, margin=1.0, bulk=0.5, error=0.2, least_threshold=0).holds
    assert not DownstreamTransfer(words=2, margin=7.0, bulk=0.5, error=0.1, least_threshold=0).holds
    assert DownstreamTransfer(words=2, margin=1.0, bulk=0.5, error=0.3, least_threshold=0).distance_floor == 0


def test_bad_input_is_refused():
    model = drawn()
    for wrong in (
        lambda: LogLinear(contexts=np.full((2, 3), np.nan), atoms=np.ones((4, 3))),
        lambda: theory.hide_word(model, 12, 1.0),
        lambda: theory.hide_word(model, 0, -1.0),
        lambda: DownstreamTransfer(words=0, margin=1.0, bulk=0.5, error=0.1, least_threshold=0),
        lambda: DownstreamTransfer(words=1, margin=1.0, bulk=1.5, error=0.1, least_threshold=0),
    ):
        with pytest.raises(InputError, match=WORDED):
            wrong()


def test_thresholds_far_away_and_words_that_are_certain():
    """In the limit of small weights c the floor is that of c → 0, and of large ones that of c → ∞."""
    floors = [
        DownstreamTransfer(words=2, margin=1.0, bulk=0.5, error=0.0, least_threshold=b).distance_floor
        for b in (-800.0, -50.0, 50.0, 800.0)
    ]
    assert floors == pytest.approx([0, 0, 0.5 * (1 - np.exp(-0.5)), 0.5 * (1 - np.exp(-0.5))], abs=1e-9)
    assert np.array_equal(theory.hidden_word_divergence(np.array([0.0, 1.0]), 800.0), [0, 0])
