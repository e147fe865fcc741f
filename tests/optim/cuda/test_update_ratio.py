"""What a direction is divided by to have the norm of AdamW's update: the kernel against `UpdateSize.ratio`."""

import pytest
import torch

from interpreter import INTERPRETED, only_interpreted
from layerwise.optim.cuda import update_ratio
from layerwise.optim.cuda.update_ratio import divisor
from layerwise.optim.step.update import UpdateSize
from random_tensors import randn
from stacked_layers import stack_of

pytestmark = pytest.mark.interpreted
SIZE = UpdateSize("adam")
TINY, MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@pytest.fixture(autouse=True)
def _by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(update_ratio, "available", lambda device: True)


@only_interpreted
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("lr", [1e-3, 10.0, 0.0])
def test_as_torch_has_it(lr: float, count: int):
    """Where the bound on a step is met (at the second rate) and where it is not; zeros, and what is not finite."""
    wanted = torch.tensor([3.0, 0.0, 1.0, 2.0, 1e-30, 5.0, torch.nan, 1.0])
    norms = torch.tensor([7.0, 1.0, 0.0, torch.inf, 1e30, TINY, 1.0, torch.nan])
    weights = [0.0 * randn(6, 5) if k == 0 else randn(6, 5, seed=k) for k in range(len(wanted))]
    stack, scales = stack_of(weights), [2.0 ** torch.arange(8.0) for _ in range(count)]
    expected = norms
    for scale in scales:
        expected = expected / scale
    expected = SIZE.ratio(stack, wanted, expected, lr).reciprocal().clamp(min=TINY)
    found = divisor(SIZE, stack, wanted, norms, scales, torch.tensor([0.5, lr])[1])
    torch.testing.assert_close(found[:6], expected[:6], rtol=1e-5, atol=0)
    assert not torch.isfinite(found[6:]).any()  # that a step is not finite stays visible


def test_a_rate_on_the_host_goes_by_torch():
    stack, wanted, norms = stack_of([randn(6, 5)]), torch.ones(1), torch.full((1,), 4.0)
    assert divisor(SIZE, stack, wanted, norms, [torch.full((1,), 2.0)], 1e-3).tolist() == [2.0]
