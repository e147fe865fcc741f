"""Adam's direction by torch's fused pass on a CPU, and by plain calls: the same."""

import pytest
import torch
from torch import Tensor

from layerwise.optim import elementwise
from layerwise.optim.elementwise import AdamRule
from layerwise.optim.rule import Context, Health, Shape


def steps_of(grads: list[Tensor], counts: list[float], dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    rule = AdamRule((0.9, 0.99))
    state = rule.init(Shape(2, 5, 3, dtype, torch.device("cpu")))
    state["steps"].copy_(torch.tensor(counts))
    D = torch.zeros(2, 5, 3)
    for grad in grads:
        D = rule.direction(state, grad, Context(1, 0.1, 0.0, False, {}), Health())
    return D, state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("counts", [[0.0, 0.0], [0.0, 3.0]])
@pytest.mark.parametrize("transposed", [False, True])
def test_torchs_pass_gives_the_direction(
    dtype: torch.dtype, counts: list[float], transposed: bool, monkeypatch: pytest.MonkeyPatch
):
    g = torch.Generator().manual_seed(0)
    grads = [torch.randn(2, 5, 3, generator=g, dtype=torch.float64).to(dtype) for _ in range(3)]
    grads = [grad.mT.contiguous().mT for grad in grads] if transposed else grads
    kept = [grad.clone() for grad in grads]
    D, state = steps_of(grads, counts, dtype)
    monkeypatch.setattr(elementwise, "FUSED", ())
    wanted, plain = steps_of(grads, counts, dtype)
    torch.testing.assert_close(D, wanted, rtol=3e-6 if dtype == torch.float32 else 1e-12, atol=0)
    for name in plain:
        torch.testing.assert_close(state[name], plain[name])
    assert state["steps"].tolist() == [count + 3 for count in counts]
    assert all(torch.equal(grad, old) for grad, old in zip(grads, kept, strict=True))


def test_the_pass_is_taken_where_memory_allows_it(monkeypatch: pytest.MonkeyPatch):
    taken = []
    monkeypatch.setattr(AdamRule, "_by_torch", lambda self, *given: taken.append(given) or given[1])
    for grad, counts in (
        (torch.ones(2, 5, 3), [0.0, 0.0]),
        (torch.ones(2, 3, 5).mT, [0.0, 0.0]),
        (torch.ones(2, 5, 3), [0.0, 1.0]),
    ):
        steps_of([grad], counts, torch.float32)
    assert len(taken) == 1
