"""Factored damping against its formulas."""

import pytest
import torch

from layerwise.optim.factored_damping import factored_damping

O, I, OWN = 40, 24, (37, 21)


@pytest.mark.parametrize("kind", ["relative", "trace", "equal"])
def test_numbers_of_each_group(kind: str):
    """Of groups with both factors, one, and none."""
    g = torch.Generator().manual_seed(0)
    s_P, s_Q = (torch.rand(4, n, generator=g) * torch.logspace(-8, 5, 4)[:, None] for n in (O, I))
    s_P[:, OWN[0] :], s_Q[:, OWN[1] :] = 0, 0
    s_P[1], s_Q[2] = 0, 0
    damping = 0.03
    found = factored_damping(s_P, s_Q, damping, relative=kind == "relative", split=kind, own=OWN)
    p, q = s_P.double().sum(1) / OWN[0], s_Q.double().sum(1) / OWN[1]
    known = (p > 0) & (q > 0)
    if kind == "relative":
        zero, one = torch.zeros_like(p), torch.ones_like(p)
        expected = [torch.where(known, x, y) for x, y in ((damping**0.5 * p, zero), (damping**0.5 * q, zero))]
        expected.append(torch.where(known, damping * p * q, one))
    else:
        pi = torch.where(known, q / torch.where(known, p, 1.0), 1.0).sqrt() if kind == "trace" else torch.ones_like(p)
        expected = [damping**0.5 / pi, damping**0.5 * pi, torch.full_like(p, damping)]
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_relative_damping_of_a_factor_that_says_nothing_is_one(value: float):
    s_P, s_Q = torch.full((1, 3), value), torch.ones(1, 4)
    for sides in ((s_P, s_Q), (s_Q, s_P)):
        assert [x.item() for x in factored_damping(*sides, 0.1, relative=True)] == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("size", [1e-14, 1e14])
def test_relative_damping_is_in_proportion_to_the_factors(size: float):
    s_P, s_Q = torch.rand(2, 300) + 0.1, torch.rand(2, 500) + 0.1
    one = factored_damping(s_P, s_Q, 0.1, relative=True)
    other = factored_damping(size * s_P, size * s_Q, 0.1, relative=True)
    for x, y, power in zip(one, other, (1, 1, 2), strict=True):
        torch.testing.assert_close(y, x * size**power)
