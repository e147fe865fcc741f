"""State is saved and loaded layer by layer: what is packed or halved is never whole for a stack at once."""

import copy
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.cuda import backend
from layerwise.optim.cuda import factor as symmetric
from layerwise.optim.cuda.storage import ALL, StoredMatrix

pytestmark = pytest.mark.usefixtures("untyped")
LAYERS = 3


def step(opt: torch.optim.Optimizer, model: nn.Module, number: int) -> None:
    x = torch.randn(12, 20, generator=torch.Generator().manual_seed(number))
    opt.zero_grad()
    model(x).square().mean().backward()
    opt.step()


@pytest.mark.parametrize("name", ["KFAC", "Shampoo"])
def test_one_layer_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backend, "PAD_TO", {"cpu": 16})
    monkeypatch.setattr(symmetric, "packs", lambda shape, size: True)
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(LAYERS)))
    make = partial(getattr(lw.optim, name), scale="formula")
    opt = make(model, lr=0.01, solver="products")
    step(opt, model, 0)
    (treated,) = [s for s in opt._stacks if "Q" in s.state]
    assert treated.groups == LAYERS
    own, whole, taken, made = StoredMatrix.value, symmetric.whole, list[int](), list[weakref.ref[Tensor]]()

    def noted(unpacked: Tensor) -> Tensor:
        made.append(weakref.ref(unpacked))
        assert sum(ref() is not None for ref in made) <= 4, "what was unpacked of other layers is still there"
        return unpacked

    def spy(matrix: StoredMatrix, groups: slice = ALL) -> Tensor:
        taken.append(len(matrix.data[groups]))
        return noted(own(matrix, groups))

    def spy_on_factors(M: Tensor) -> Tensor:
        taken.append(len(M))
        return noted(whole(M))

    monkeypatch.setattr(StoredMatrix, "value", spy)
    monkeypatch.setattr(symmetric, "whole", spy_on_factors)
    saved = opt.state_dict()
    assert {*taken} == {1}
    assert len(taken) >= LAYERS * 4  # both factors, and a root or basis of each
    taken.clear()
    other = make(model, lr=0.01, solver="products")
    other.load_state_dict(copy.deepcopy(saved))
    step(other, model, 1)
    assert {*taken} == {1}
