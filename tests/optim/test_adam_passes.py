"""Adam's direction on a CPU, by torch's fused pass where memory allows it, against the formula."""

import pytest
import torch
from torch import Tensor

from layerwise.optim import reference
from layerwise.optim.elementwise import AdamRule
from layerwise.optim.reference import Reference
from layerwise.optim.rule import Context, Shape

BETAS, EPS = (0.9, 0.99), 1e-8


def steps_of(grads: list[Tensor], counts: list[float], dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    rule, backend = AdamRule(BETAS, EPS), Reference()
    state = rule.init(Shape(2, 5, 3, dtype, torch.device("cpu")), backend)
    state["steps"].copy_(torch.tensor(counts))
    D = torch.zeros(2, 5, 3)
    for grad in grads:
        D = rule.direction(state, grad, Context(1, 0.1, 0.0, False, {}, backend))
    return D, state


def by_formula(grads: list[Tensor], counts: list[float], dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    m, v, steps, D = (
        torch.zeros(2, 5, 3, dtype=dtype),
        torch.zeros(2, 5, 3, dtype=dtype),
        torch.tensor(counts),
        grads[0],
    )
    (b1, b2), steps = BETAS, steps.to(dtype)
    for grad in grads:
        steps = steps + 1
        t = steps.view(-1, 1, 1)
        m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad.square()
        D = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + EPS)
    return D, {"m": m, "v": v, "steps": steps}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("counts", [[0.0, 0.0], [0.0, 3.0]])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_pass_gives_the_direction(dtype: torch.dtype, counts: list[float], transposed: bool):
    g = torch.Generator().manual_seed(0)
    grads = [torch.randn(2, 5, 3, generator=g, dtype=torch.float64).to(dtype) for _ in range(3)]
    grads = [grad.mT.contiguous().mT for grad in grads] if transposed else grads
    kept = [grad.clone() for grad in grads]
    D, state = steps_of(grads, counts, dtype)
    wanted, plain = by_formula(grads, counts, dtype)
    torch.testing.assert_close(D, wanted, rtol=3e-6 if dtype == torch.float32 else 1e-12, atol=0)
    for name in plain:
        torch.testing.assert_close(state[name], plain[name])
    assert state["steps"].tolist() == [count + 3 for count in counts]
    assert all(torch.equal(grad, old) for grad, old in zip(grads, kept, strict=True))


def test_torchs_pass_is_taken_where_memory_allows_it(monkeypatch: pytest.MonkeyPatch):
    taken, adam = [], reference.adam
    monkeypatch.setattr(reference, "adam", lambda *given, **options: taken.append(given) or adam(*given, **options))
    for grad, counts in (
        (torch.ones(2, 5, 3), [0.0, 0.0]),
        (torch.ones(2, 3, 5).mT, [0.0, 0.0]),
        (torch.ones(2, 5, 3), [0.0, 1.0]),
    ):
        steps_of([grad], counts, torch.float32)
    assert len(taken) == 1
