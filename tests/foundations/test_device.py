"""Values that are read back later than they are sent, and checks that are settled together."""

import pytest
import torch

from layerwise.foundations.device import Checks, Readback, not_finite


def test_what_is_read_back_is_what_was_there():
    assert Readback(torch.tensor([1, -2])).read() == [1, -2]
    twice = Readback(torch.tensor([0.5]))
    assert twice.read() == twice.read() == [0.5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_not_finite(dtype: torch.dtype, bad: float):
    t = torch.full((3, 40), torch.finfo(dtype).max, dtype=dtype)  # a sum would overflow
    assert not not_finite(t)
    t[1, 17] = bad
    assert not_finite(t)
    assert not not_finite(t[:0])


def test_the_first_that_is_bad_is_raised():
    checks, called = Checks(), []

    def error(name: str) -> Exception:
        called.append(name)
        return ValueError(name)

    for name, bad in (("a", False), ("b", True), ("c", True)):
        checks.add(torch.tensor(bad), lambda name=name: error(name))
    checks.read()  # nothing has been sent yet
    with pytest.raises(ValueError, match="b"):
        checks.settle()
    assert called == ["b"]
    checks.settle()  # what was not read is forgotten with the call that made it


def test_what_was_sent_before_comes_first():
    checks = Checks()
    checks.add(torch.tensor(True), lambda: ValueError("first"))
    checks.send()
    checks.add(torch.tensor(True), lambda: ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        checks.read()
    checks.settle()
