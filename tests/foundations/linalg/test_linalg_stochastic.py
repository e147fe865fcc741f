import math

import pytest
import torch

from layerwise.foundations.errors import InputError, NumericalError
from layerwise.foundations.linalg import (
    Estimate,
    frobenius_squared,
    hutchinson_diagonal,
    hutchinson_trace,
    slq_logdet,
)

F64 = torch.float64
REPEATS = 200


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def psd(d, decay=1.0, seed=1):
    Q = torch.linalg.qr(torch.randn(d, d, generator=generator(seed), dtype=F64)).Q
    return (Q * torch.arange(1, d + 1, dtype=F64) ** -decay) @ Q.T


M = psd(60, decay=0.5)
INDEFINITE = psd(60, decay=0.5, seed=2) - 0.2 * psd(60, decay=0.5, seed=3)
STEEP = psd(200, decay=1.5)


def times(A):
    return lambda X: A @ X


def trace(A, samples=24, **options):
    exact = float(A.trace())
    return exact, lambda g: hutchinson_trace(times(A), len(A), samples, g, F64, **options)


def frobenius(A, samples=20):
    return float((A**2).sum()), lambda g: frobenius_squared(times(A), len(A), samples, g, F64)


def logdet(A, samples=16):
    exact = float(torch.logdet(A + 0.1 * torch.eye(len(A), dtype=F64)))
    return exact, lambda g: slq_logdet(times(A), len(A), 0.1, samples, 12, g, F64)


CASES = {
    "trace": trace(M),
    "trace, indefinite": trace(INDEFINITE),
    "trace, hutch++": trace(M, 48),
    "trace, hutch++, indefinite": trace(INDEFINITE, 48, method="hutch++"),
    "frobenius": frobenius(M),
    "frobenius, indefinite": frobenius(INDEFINITE),
    "frobenius, one eigenvalue dominates": frobenius(STEEP, 150),
    "logdet": logdet(M),
}


@pytest.mark.parametrize("name", CASES)
def test_standard_errors_are_calibrated(name):
    exact, estimator = CASES[name]
    g = generator(7)
    z, values = torch.empty(2, REPEATS, dtype=F64)
    for i in range(REPEATS):
        x = estimator(g)
        assert isinstance(x, Estimate)
        z[i], values[i] = (float(x) - exact) / x.standard_error, float(x)
    assert 0.7 <= float((z**2).mean().sqrt()) <= 1.4
    assert abs(float(values.mean()) - exact) < 4 * float(values.std()) / math.sqrt(REPEATS)  # no bias


def test_diagonal_errors_are_calibrated():
    g = generator(8)
    z = torch.empty(REPEATS, 60, dtype=F64)
    for i in range(REPEATS):
        values, errors = hutchinson_diagonal(times(M), 60, 20, g, F64, chunk=7)  # chunks of uneven length
        z[i] = (values - M.diagonal()) / errors
    assert 0.7 <= float((z**2).mean().sqrt()) <= 1.4


def test_diagonal_by_chunks_is_the_mean_and_deviation_of_all_samples():
    whole = hutchinson_diagonal(times(M), 60, 20, generator(), F64, chunk=20)
    columns = []
    hutchinson_diagonal(lambda X: columns.append(X) or M @ X, 60, 20, generator(), F64, chunk=20)
    x = torch.cat([Z * (M @ Z) for Z in columns], 1)
    torch.testing.assert_close(whole, (x.mean(1), x.std(1) / math.sqrt(20)))


def test_hutchpp_is_more_precise_on_a_decaying_spectrum():
    steep = psd(200, decay=2.0)
    plain = hutchinson_trace(times(steep), 200, 60, generator(), F64, method="hutchinson")
    better = hutchinson_trace(times(steep), 200, 60, generator(), F64)
    assert better.standard_error < 0.1 * plain.standard_error
    assert abs(float(better) - float(steep.trace())) < 6 * better.standard_error


@pytest.mark.parametrize("d", [1, 5])
def test_as_many_samples_as_dimensions_are_exact(d):
    A = INDEFINITE[:d, :d]
    x = hutchinson_trace(times(A), d, d, generator(), F64, chunk=2)
    torch.testing.assert_close(x, A.trace())
    y = frobenius_squared(times(A), d, d + 3, generator(), F64, chunk=2)
    torch.testing.assert_close(y, (A**2).sum())
    assert x.standard_error == y.standard_error == 0.0
    values, errors = hutchinson_diagonal(times(A), d, d, generator(), F64, chunk=2)
    torch.testing.assert_close(values, A.diagonal())
    assert not errors.any()


def test_the_samples_are_applied_in_blocks_and_not_more_than_asked():
    for method in ("hutchinson", "hutch++"):
        widths = []
        hutchinson_trace(
            lambda X, seen=widths: seen.append(X.shape[1]) or M @ X,
            60,
            31,
            generator(),
            F64,
            method=method,
            chunk=8,
        )
        assert max(widths) <= 8
        assert sum(widths) == 31


def test_empty_operators():
    A = torch.zeros(0, 0, dtype=F64)
    assert float(hutchinson_trace(times(A), 0, 4, generator(), F64)) == 0.0
    assert float(frobenius_squared(times(A), 0, 4, generator(), F64)) == 0.0
    assert hutchinson_diagonal(times(A), 0, 4, generator(), F64)[0].shape == (0,)
    assert float(slq_logdet(times(A), 0, 1.0, 4, 4, generator(), F64)) == 0.0


def test_one_sample_has_no_error_to_show():
    assert hutchinson_trace(times(M), 60, 1, generator(), F64).standard_error == math.inf
    assert hutchinson_diagonal(times(M), 60, 1, generator(), F64)[1].isinf().all()


def test_logdet_of_a_singular_matrix_in_float32():
    low = psd(80).float()
    low = low[:, :5] @ low[:, :5].T
    x = slq_logdet(times(low), 80, 1e-3, 32, 20, generator())
    exact = float(torch.logdet(low.double() + 1e-3 * torch.eye(80, dtype=F64)))
    assert x.dtype == torch.float32
    assert abs(float(x) - exact) < 5 * x.standard_error + 1e-3 * abs(exact)


def test_logdet_of_an_indefinite_operator_is_refused():
    with pytest.raises(NumericalError, match=r"damping=0.1.*positive definite"):
        slq_logdet(times(-torch.eye(5)), 5, 0.1, 2, 5, generator())


@pytest.mark.parametrize("name", CASES)
def test_same_seed_same_result_and_the_global_state_is_untouched(name):
    before = torch.get_rng_state()
    one, two = (CASES[name][1](generator(3)) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(before, torch.get_rng_state())


def test_wrong_arguments_are_explained():
    with pytest.raises(InputError, match="samples=0"):
        hutchinson_trace(times(M), 60, 0, generator(), F64)
    with pytest.raises(InputError, match="steps=0"):
        slq_logdet(times(M), 60, 1.0, 2, 0, generator(), F64)
