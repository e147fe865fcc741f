"""The inverse of the relative entropy of coins: against 40 digits, at its edges, and the rows of Table C.8."""

from decimal import Decimal, localcontext

import pytest
import torch

from error_sentences import THREE
from layerwise import bounds
from layerwise.foundations.errors import InputError

BELOW_THE_CAP = {  # bound, KL, SNN loss, ½ log λ, and the j that comes out
    "T-600 BASE": (0.1540, 4612.6, 0.03373, -1.3313, 36),
    "T-600 APPR": (0.1432, 3980.6, 0.03417, -1.6063, 91),
    "T-600 ITER": (0.1198, 3766.1, 0.02347, -1.2913, 28),
    "T-1200 ITER": (0.1417, 5071.0, 0.02292, -1.4763, 65),
    "R-600 BASE": (0.6046, 1144.8, 0.507, -1.8263, 135),
    "R-600 ITER.M": (0.5616, 340.62, 0.5065, -2.5263, 275),
    "T-600 of 10 ITER": (0.2132, 8697.9, 0.02947, -1.3063, 31),
    "T-600² of 10 ITER": (0.2431, 10568.0, 0.03057, -1.5713, 84),
}
AT_THE_CAP = {  # printed bound, KL, SNN loss, and the bound with j = 1
    "T-300² BASE": (0.1686, 5514.9, 0.03329, 0.1690),
    "T-200² of 10 BASE": (0.4165, 21896.0, 0.04706, 0.4168),
    "T-200² of 10 ITER": (0.2145, 9821.0, 0.02229, 0.2148),
    "T-200² of 10 ITER(D)": (0.2311, 9758.5, 0.03071, 0.2314),
}


def exact(error: float, rate: float) -> Decimal:
    """By bisection with 40 digits."""
    with localcontext() as context:
        context.prec = 40
        q, most = Decimal(error), Decimal(rate)

        def kl(p: Decimal) -> Decimal:
            return (q * (q / p).ln() if q else Decimal(0)) + (1 - q) * ((1 - q) / (1 - p)).ln()

        low, high = q, Decimal(1)
        for _ in range(105):
            middle = (low + high) / 2
            low, high = (low, middle) if middle == 1 or kl(middle) > most else (middle, high)
        return low


@pytest.mark.parametrize(
    ("error", "rate"),
    [(0.0, 0.3), (1e-12, 1e-9), (0.03, 1e-14), (0.03, 0.08), (0.5, 5.0), (0.999999, 1e-4), (1 - 1e-13, 1.0)],
)
def test_all_digits_are_right(error, rate):
    found, expected = bounds.kl_inverse(error, rate), exact(error, rate)
    assert abs(Decimal(found) - expected) <= Decimal("4e-16") * expected


def test_edges():
    assert bounds.kl_inverse(0.3, 0.0) == 0.3
    assert bounds.kl_inverse(0.3, float("inf")) == 1.0
    assert bounds.kl_inverse(1.0, 0.1) == 1.0
    assert bounds.kl_inverse(0.0, 1e-300) == 1e-300


def test_it_rises_with_both_and_is_undone_by_the_relative_entropy():
    q, r = torch.meshgrid(
        torch.linspace(0, 1, 41, dtype=torch.float64), torch.logspace(-8, 1.5, 40, dtype=torch.float64), indexing="ij"
    )
    p = bounds.kl_inverse(q, r)
    assert bool((p.diff(dim=0) >= 0).all())
    assert bool((p.diff(dim=1) >= 0).all())
    inside = (q > 0) & (1 - p > 1e-6)
    # kl is flat at p = q, so that its digits are as many as those of p − q
    torch.testing.assert_close(bounds.binary_kl(q[inside], p[inside]), r[inside], rtol=1e-5, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype):
    q, r = torch.tensor([0.0, 0.03125, 0.5, 1.0], dtype=dtype), torch.tensor(0.125, dtype=dtype)
    found = bounds.kl_inverse(q, r)
    assert found.dtype == dtype
    torch.testing.assert_close(found, bounds.kl_inverse(q.double(), 0.125).to(dtype))
    assert bounds.kl_inverse(torch.tensor([0, 1]), 0.1).dtype == torch.get_default_dtype()


@pytest.mark.parametrize(("error", "rate"), [(-0.1, 0.1), (1.5, 0.1), (0.1, -1.0), (0.1, float("nan"))])
def test_what_is_no_error_or_rate_is_refused(error, rate):
    with pytest.raises(InputError, match=THREE):
        bounds.kl_inverse(torch.tensor([0.2, error]), rate)


@pytest.mark.parametrize("row", BELOW_THE_CAP)
def test_printed_bounds_come_out_to_four_decimals(row):
    bound, kl, error, half_log, place = BELOW_THE_CAP[row]
    j = bounds.PriorGrid().index(half_log)
    assert j == place
    assert round(bounds.kl_inverse(error, bounds.relative_entropy_rate(kl, j, 60_000)), 4) == bound


@pytest.mark.parametrize("row", AT_THE_CAP)
def test_bounds_printed_at_the_cap_are_too_small(row):
    printed, kl, error, corrected = AT_THE_CAP[row]
    j = bounds.PriorGrid().index(-1.1513)
    assert j == 1
    found = bounds.kl_inverse(error, bounds.relative_entropy_rate(kl, j, 60_000))
    assert found == pytest.approx(corrected, abs=1e-4)  # KL is printed with five digits
    assert found > printed + 2e-4


def test_there_is_no_prior_at_the_cap():
    with pytest.raises(InputError, match="j ≥ 1"):
        bounds.relative_entropy_rate(100.0, 0, 1000)
    with pytest.raises(InputError, match="j ≥ 1"):
        bounds.PriorGrid().half_log(0)


@pytest.mark.parametrize(("spread", "parameters"), [(0.5, 3), (40.0, 500), (1e-4, 20), (1e3, 50)])
def test_the_best_prior_is_that_of_a_search_over_all(spread, parameters):
    grid = bounds.PriorGrid(cap=0.1, precision=20)
    kl = {j: 1e3 + 0.5 * (spread / grid.variance(j) + 2 * parameters * grid.half_log(j)) for j in range(1, 2000)}
    best = min(kl, key=lambda j: bounds.relative_entropy_rate(kl[j], j, 1000))
    assert grid.best(spread, 0.0, parameters) == best
