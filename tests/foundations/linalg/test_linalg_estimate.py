import copy
import math
import pickle

import pytest
import torch

from layerwise.foundations.linalg import Estimate


def estimate(value=12.3456, error=0.41):
    return Estimate(torch.tensor(value), standard_error=error, samples=32)


def test_behaves_as_a_number():
    x = estimate(2.0)
    assert isinstance(x, torch.Tensor)
    assert (x.ndim, float(x), x.item()) == (0, 2.0, 2.0)
    assert math.isclose(x, 2.0)
    torch.testing.assert_close(x, torch.tensor(2.0))
    assert x > 1.9
    assert f"{x:.1f}" == "2.0"


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x + 1,
        lambda x: 2 * x,
        lambda x: x.sqrt(),
        lambda x: torch.stack([x, x]),
        lambda x: x.double(),
    ],
)
def test_operations_give_plain_tensors(op):
    y = op(estimate())
    assert type(y) is torch.Tensor
    assert not hasattr(y, "standard_error")


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (12.3456, 0.41, "12.35 ± 0.41 (32 samples)"),
        (123456.0, 2345.0, "123456 ± 2345 (32 samples)"),
        (2.0, 0.0, "2 ± 0 (32 samples)"),
        (2.0, math.inf, "2 ± inf (32 samples)"),
        (1.5e-20, 2e-21, "1.5e-20 ± 2e-21 (32 samples)"),
    ],
)
def test_repr(value, error, text):
    assert repr(estimate(value, error)) == str(estimate(value, error)) == text


def test_copies_keep_the_error():
    for twin in (copy.copy(estimate()), copy.deepcopy(estimate()), pickle.loads(pickle.dumps(estimate()))):
        assert type(twin) is Estimate
        assert repr(twin) == repr(estimate())


def test_from_samples():
    x = Estimate.from_samples(torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64), offset=10.0)
    assert (float(x), x.samples, x.dtype) == (13.0, 3, torch.float64)
    assert x.standard_error == pytest.approx(math.sqrt(7.0 / 3))
    assert Estimate.from_samples(torch.ones(1)).standard_error == math.inf
