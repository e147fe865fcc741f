"""Measures of kernels against their formulas, written with numpy."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import close, features, gaussian, mlp, refused
from torch import Tensor

import layerwise as lw
from layerwise.foundations.errors import InputError
from layerwise.kernel.kernel import MatrixKernel

N, P = 7, 3
CENTERINGS = ("none", "per-output", "global")
LABELS = torch.tensor([0, 2, 1, 1, 0, 2, 2])


@pytest.fixture(scope="module")
def K() -> lw.Kernel:
    return lw.ntk(mlp(4, 5, P), gaussian(N, 4))


@pytest.fixture(scope="module")
def other() -> lw.Kernel:
    return lw.ntk(mlp(4, 6, P, seed=1), gaussian(N, 4))


def _matrix() -> np.ndarray:
    J = features(mlp(4, 5, P), gaussian(N, 4)).numpy()
    return J @ J.T


def _centering(name: str, n: int = N, p: int = P) -> np.ndarray:
    """C_n ⊗ I_p, C_np, or the identity, as matrices."""
    if name == "none":
        return np.eye(n * p)
    if name == "global":
        return np.eye(n * p) - np.ones((n * p, n * p)) / (n * p)
    return np.kron(np.eye(n) - np.ones((n, n)) / n, np.eye(p))


def _centred(K: np.ndarray, name: str, p: int = P) -> np.ndarray:
    C = _centering(name, len(K) // p, p)
    return C @ K @ C


def _cosine(A: np.ndarray, B: np.ndarray) -> float:
    return float(np.trace(A @ B) / (np.linalg.norm(A) * np.linalg.norm(B)))


def _one_hot(labels: Tensor, classes: int = P) -> np.ndarray:
    return np.eye(classes)[labels.numpy()]


# --- alignment and CKA --------------------------------------------------------------------------------------


@pytest.mark.parametrize("centering", CENTERINGS)
def test_alignment_of_two_kernels(K: lw.Kernel, other: lw.Kernel, centering: str):
    A, B = (_centred(k.matrix().numpy(), centering) for k in (K, other))
    for second in (other, other.matrix()):
        close(lw.alignment(K, second, centering), _cosine(A, B))
    close(lw.cka(K, other, centering), _cosine(A, B))
    close(lw.alignment(K, K, centering), 1.0)


@pytest.mark.parametrize("centering", CENTERINGS)
def test_alignment_with_labels(K: lw.Kernel, centering: str):
    """Ycᵀ Kc Yc / (‖Kc‖ ‖Yc‖²), Y one-hot labels flattened example-major and centred like K."""
    Kc = _centred(_matrix(), centering)
    Yc = _centering(centering) @ _one_hot(LABELS).flatten()
    expected = Yc @ Kc @ Yc / (np.linalg.norm(Kc) * (Yc @ Yc))
    close(lw.alignment(K, LABELS, centering), expected)
    values = torch.as_tensor(_one_hot(LABELS))
    for target in (values, values.flatten(), values.float()):
        close(lw.alignment(K, target, centering), expected)
    close(lw.cka(K, LABELS, centering), expected)


def test_defaults_are_those_of_the_specification(K: lw.Kernel, other: lw.Kernel):
    """Alignment as it is; CKA, effective rank, trace ratio and spectrum centred per output."""
    close(lw.alignment(K, other), lw.alignment(K, other, "none"))
    close(lw.cka(K, other), lw.cka(K, other, "per-output"))
    close(lw.effective_rank(K), lw.effective_rank(K, "per-output"))
    close(lw.trace_ratio(K, 2), lw.trace_ratio(K, 2, "per-output"))
    close(lw.spectrum(K).values, lw.spectrum(K, "per-output").values)


def test_the_two_centerings_differ(K: lw.Kernel):
    assert abs(float(lw.cka(K, LABELS) - lw.cka(K, LABELS, "global"))) > 1e-3


@pytest.mark.parametrize("centering", CENTERINGS)
def test_labels_for_one_function_an_example(centering: str):
    """K′ is 1 where two examples have one label, whatever the labels are called."""
    model, x = mlp(4, 5, P), gaussian(N, 4)
    K = lw.ntk(model, x, outputs="sum")
    same = (LABELS.unsqueeze(0) == LABELS.unsqueeze(1)).double().numpy()
    expected = _cosine(_centred(K.matrix().numpy(), centering, 1), _centred(same, centering, 1))
    close(lw.alignment(K, LABELS, centering), expected)
    close(lw.alignment(K, 5 * LABELS + 2, centering), expected)


@pytest.mark.parametrize("centering", CENTERINGS)
def test_values_for_one_function_an_example(centering: str):
    model, x, y = mlp(4, 5, P), gaussian(N, 4), gaussian(N, seed=5)
    K = lw.ntk(model, x, outputs=0)
    Y = np.outer(y, y)
    expected = _cosine(_centred(K.matrix().numpy(), centering, 1), _centred(Y, centering, 1))
    close(lw.alignment(K, y, centering), expected)
    close(lw.alignment(K, y.unsqueeze(1), centering), expected)


def test_layers_have_measures_of_their_own(K: lw.Kernel):
    parts = K.per_layer()
    for part in parts.values():
        close(lw.cka(part, LABELS), lw.cka(MatrixKernel(part.matrix(), (P,)), LABELS))
        assert 0 <= float(lw.cka(part, LABELS)) <= 1
    whole = MatrixKernel(sum(part.matrix() for part in parts.values()), (P,))
    close(lw.cka(whole, LABELS), lw.cka(K, LABELS))


def test_a_zero_kernel_is_aligned_with_nothing(K: lw.Kernel):
    zero = torch.zeros(N * P, N * P, dtype=torch.float64)
    for found in (lw.alignment(zero, K), lw.alignment(K, zero), lw.cka(K, zero), lw.effective_rank(zero)):
        assert float(found) == 0.0
    assert float(lw.trace_ratio(zero, 2)) == 0.0
    assert float(lw.cka(K, torch.zeros(N, dtype=torch.long), "per-output")) == 0.0  # one label: nothing after centring


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(2, 8), rank=st.integers(1, 8), seed=st.integers(0, 99), scale=st.floats(1e-3, 1e3))
def test_measures_are_bounded_and_blind_to_scale(rows: int, rank: int, seed: int, scale: float):
    A, B = gaussian(rows, rank, seed=seed), gaussian(rows, rank, seed=seed + 1)
    A, B = A @ A.mT, B @ B.mT
    for centering in CENTERINGS:
        found = float(lw.alignment(A, B, centering))
        assert -1e-12 <= found <= 1 + 1e-12
        assert abs(found - float(lw.alignment(scale * A, B, centering))) < 1e-9
        assert abs(float(lw.effective_rank(A, centering)) - float(lw.effective_rank(scale * A, centering))) < 1e-6
        assert 1 - 1e-9 <= float(lw.effective_rank(A, centering)) <= min(rows, rank) + 1e-9


# --- spectra ------------------------------------------------------------------------------------------------


def _values(centering: str) -> np.ndarray:
    """Eigenvalues, largest first, those up to 1e-12 of the largest as zero."""
    values = np.linalg.eigvalsh(_centred(_matrix(), centering))[::-1]
    return np.where(values > 1e-12 * values[0], values, 0.0)


@pytest.mark.parametrize("centering", CENTERINGS)
def test_the_spectrum_and_its_summaries(K: lw.Kernel, centering: str):
    values, found = _values(centering), lw.spectrum(K, centering)
    close(found.values, values.copy())
    close(found.max(), values.max())
    close(found.mean(), values.mean())
    close(found.median(), np.median(values))
    assert found.dropped == int((values == 0).sum())
    assert found.floor == pytest.approx(1e-12 * values[0])
    for word in (f"{N * P} eigenvalues", f"max {values[0]:.4g}", f"{found.dropped} at or below the floor"):
        assert word in str(found)


def test_the_median_of_an_even_number_of_eigenvalues():
    assert float(lw.spectrum(torch.diag(torch.tensor([4.0, 3.0, 1.0, 0.5])), "none").median()) == 2.0


@pytest.mark.parametrize("centering", CENTERINGS)
def test_the_effective_rank(K: lw.Kernel, centering: str):
    mu = _values(centering)
    mu = mu[mu > 0] / mu.sum()
    expected = np.exp(-(mu * np.log(mu)).sum())
    close(lw.effective_rank(K, centering), expected)
    close(lw.effective_rank(K.matrix(), "none"), lw.effective_rank(K, "none"))


@pytest.mark.parametrize("centering", CENTERINGS)
@pytest.mark.parametrize("k", [1, 4, N * P])
def test_the_trace_ratio(K: lw.Kernel, centering: str, k: int):
    values = _values(centering)
    close(lw.trace_ratio(K, k, centering), values[:k].sum() / values.sum())
    close(lw.spectrum(K, centering).trace_ratio(k), values[:k].sum() / values.sum())


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_equal_eigenvalues_count_one_each(rank: int):
    Q = torch.linalg.qr(gaussian(8, 8)).Q[:, :rank]
    close(lw.effective_rank(3.7 * Q @ Q.mT, "none"), float(rank))
    close(lw.trace_ratio(Q @ Q.mT, 1, "none"), 1 / rank)


def test_a_kernel_that_is_not_formed_needs_only_products(monkeypatch: pytest.MonkeyPatch):
    """Lanczos for the largest eigenvalues, one pass for the trace."""
    monkeypatch.setattr("layerwise.kernel.kernel.DENSE_EIGH", 4)
    K = lw.ntk(mlp(4, 5, P), gaussian(N, 4))
    for centering in CENTERINGS:
        values = _values(centering)
        close(lw.trace_ratio(K, 3, centering), values[:3].sum() / values.sum(), 1e-7)
    assert not K.has_matrix()


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (torch.zeros(N + 1, dtype=torch.long), ("(8,)", "integer labels (7,)")),
        (torch.zeros(N), ("(7,), torch.float32", "Pass labels as integers")),
        (torch.zeros(4, 4, dtype=torch.float64), ("(4, 4)", "21 rows")),
        ([0, 1, 2], ("[0, 1, 2]",)),
        (torch.tensor([0, 1, 2, 3, 0, 0, 0]), ("labels from 0 to 3", "from 0 to 2")),
        (torch.tensor([0, 1, 2, -1, 0, 0, 0]), ("labels from -1 to 2",)),
    ],
)
def test_targets_that_do_not_fit(K: lw.Kernel, target: Any, words: tuple[str, ...]):
    with refused(InputError, *words):
        lw.alignment(K, target)


def test_kernels_of_other_examples(K: lw.Kernel):
    other = lw.ntk(mlp(4, 5, P), gaussian(N - 1, 4))
    with refused(InputError, "21 and 18 rows"):
        lw.cka(K, other)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("K", [torch.eye(3)[:2], torch.ones(3), torch.eye(3, dtype=torch.long), "kernel", np.eye(3)])
def test_what_is_no_kernel(K: Any):
    for measure in (lw.effective_rank, lw.spectrum, lambda k: lw.alignment(k, torch.eye(3))):
        with refused(InputError, "a square kernel, or its matrix"):
            measure(K)


def test_cross_kernels_and_unknown_centerings(K: lw.Kernel):
    cross = lw.ntk(mlp(4, 5, P), gaussian(N, 4), gaussian(2, 4))
    for measure in (lw.effective_rank, lw.spectrum, lambda k: lw.cka(k, LABELS), lambda k: lw.trace_ratio(k, 1)):
        with refused(InputError, "between two sets (7 and 2 examples)"):
            measure(cross)
    for centering in ("both", "per_output"):
        with refused(InputError, f"centering='{centering}'", "Available: global, none, per-output."):
            lw.cka(K, LABELS, centering)
    for k in (0, N * P + 1):
        with refused(InputError, f"k={k}", "from 1 to 21"):
            lw.trace_ratio(K, k)
