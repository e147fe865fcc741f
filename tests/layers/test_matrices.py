"""Which matrix: several in one weight, for curvature and optimizers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.errors import InputError
from layerwise.layers.matrices import checked

N, T, D = 4, 3, 4


class Fused(nn.Module):
    """Query, key and value in one weight, stored either way."""

    def __init__(self, transposed: bool, apart: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight, bias = torch.randn(3 * D, D), torch.randn(3 * D)
        self.transposed, self.apart = transposed, apart
        if apart:
            self.qkv: Any = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
            for part, w, b in zip(self.qkv, weight.chunk(3), bias.chunk(3), strict=True):
                part.weight.data, part.bias.data = w.clone(), b.clone()
        elif transposed:
            self.w, self.b = nn.Parameter(weight.T.clone()), nn.Parameter(bias)
        else:
            self.qkv = nn.Linear(D, 3 * D)
            self.qkv.weight.data, self.qkv.bias.data = weight, bias
        torch.manual_seed(2)
        self.head = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.apart:
            q, k, v = (part(x) for part in self.qkv)
        else:
            y = torch.addmm(self.b, x.flatten(0, 1), self.w).view(N, T, -1) if self.transposed else self.qkv(x)
            q, k, v = y.chunk(3, -1)
        return self.head(((q @ k.mT).softmax(-1) @ v).mean(1))


def _data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(N, T, D, generator=g), torch.randint(2, (N,), generator=g)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_split_weight_has_the_factors_of_the_layers_it_holds(transposed: bool) -> None:
    name = "w" if transposed else "qkv"
    found = lw.fisher(Fused(transposed), _data(), "categorical", "kfac", "exact", matrices={name: lw.split(3)})
    apart = lw.fisher(Fused(False, apart=True), _data(), "categorical", "kfac", "exact")
    assert found.table.spec(name).form.shape == (3, D, D + 1)
    for k in range(3):
        torch.testing.assert_close(found.operators[name].G[k], apart.operators[f"qkv.{k}"].G[0])
        torch.testing.assert_close(found.operators[name].A.dense()[k], apart.operators[f"qkv.{k}"].A.dense()[0])


@pytest.mark.parametrize("transposed", [False, True])
def test_exact_structures_stay_exact(transposed: bool) -> None:
    model = Fused(transposed)
    name = "w" if transposed else "qkv"
    plain = lw.fisher(model, _data(), "categorical", "dense", "exact").to_dense()
    cut = lw.fisher(model, _data(), "categorical", "dense", "exact", matrices={name: lw.split(3, heads=2)}).to_dense()
    torch.testing.assert_close(cut, plain)
    moment = lw.gradient_moment(model, _data(), "categorical", "diag", matrices={name: lw.split(3)})
    torch.testing.assert_close(
        moment.diagonal().flat(), lw.gradient_moment(model, _data(), "categorical", "diag").diagonal().flat()
    )


def test_the_table_shows_it() -> None:
    assert "12×1×5" in str(lw.layers(Fused(False), matrices={"qkv": lw.split(3, heads=4)}))


@pytest.mark.parametrize(
    ("matrices", "says"),
    [
        ({"qkv": lw.split(5)}, "cut into 5"),
        ({"kqv": lw.split(3)}, "matches no layer"),
        ({"qkv": lw.batched()}, "[K, a, b]"),
    ],
)
def test_what_is_wrong_is_said(matrices: Any, says: str) -> None:
    with pytest.raises(InputError, match=says.replace("[", r"\[").replace("(", r"\(")):
        lw.layers(Fused(False), matrices=matrices)


@pytest.mark.parametrize(("matrices", "says"), [({"qkv": 3}, "lw.split"), (["qkv"], "a mapping")])
def test_what_is_no_mapping_to_splits_is_said(matrices: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        checked(matrices)


def test_split_wants_whole_numbers() -> None:
    with pytest.raises(InputError, match="parts=0"):
        lw.split(0)
