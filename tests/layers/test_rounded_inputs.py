"""Under autocast linear layers and convolutions round their inputs: moments are those of the rounded rows."""

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.linalg.symmetric_product import linear_moment

HALF = torch.bfloat16


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def moment(rows: Tensor) -> Tensor:
    """With a one for the bias, in float64."""
    rows = nn.functional.pad(rows.detach().flatten(0, -2).double(), (0, 1), value=1.0)
    return rows.mT @ rows / len(rows)


class Normed(nn.Module):
    """A norm, which autocast computes in single precision on a GPU, and the layer that rounds its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 32), nn.LayerNorm(32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.single(self.first(x)))

    def single(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.norm(h.float())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_moments_of_what_the_layer_saw():
    torch.manual_seed(0)
    model = Normed()
    with torch.no_grad():
        model.norm.bias.add_(3.0)  # rounding errors of a mean do not average out
    x, y = torch.randn(64, 7, 6), torch.randint(3, (64, 7))
    seen: list[Tensor] = []
    model.second.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.autocast("cpu", HALF):
        F = lw.fisher(model, (x, y), class_axis=-1)
    rows = next(t for t in seen if t.shape[0] == 64)
    assert rows.dtype == torch.float32
    A = F.operators["second"].A.values[0]
    assert relative(A, moment(rows.to(HALF))) < 1e-5
    assert relative(A, moment(rows)) > 1e-5
    assert relative(F.operators["first"].A.values[0], moment(x.to(HALF))) < 1e-5


@pytest.mark.parametrize("conv", ["kfc", "sua"])
@pytest.mark.parametrize("layer", [nn.Conv2d(2, 3, 3, padding=1), nn.ConvTranspose2d(2, 3, 2)])
def test_moments_of_what_a_convolution_saw(layer: nn.Module, conv: Literal["kfc", "sua"]):
    torch.manual_seed(0)
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(3))
    x, y = torch.randn(32, 2, 5, 5) + 3.0, torch.randint(3, (32,))
    model(x)
    rounded = x.to(HALF).float()
    with torch.autocast("cpu", HALF):
        found = lw.fisher(model, (x, y), conv=conv).operators
    seen, unrounded = lw.fisher(model, (rounded, y), conv=conv).operators, lw.fisher(model, (x, y), conv=conv).operators
    name = next(iter(found))
    A, expected, other = (ops[name].A.values[0] for ops in (found, seen, unrounded))
    assert relative(A, expected.double()) < 1e-5
    assert relative(A, other.double()) > 1e-5


def test_single_precision_stays_single():
    torch.manual_seed(0)
    model, x, y = Normed(), torch.randn(64, 7, 6), torch.randint(3, (64, 7))
    F = lw.fisher(model, (x, y), class_axis=-1)
    assert relative(F.operators["second"].A.values[0], moment(model.norm(model.first(x)))) < 1e-6


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, HALF])
@pytest.mark.parametrize("lead", [(5,), (2, 3), (), (0,)])
def test_linear_moment(bias: bool, dtype: torch.dtype, lead: tuple[int, ...]):
    x = torch.randn(*lead, 4).to(dtype)
    found, count = linear_moment(x, bias)
    rows = x.reshape(-1, 4).double()
    rows = nn.functional.pad(rows, (0, 1), value=1.0) if bias else rows
    assert count == len(rows)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found[0].double(), rows.mT @ rows, rtol=1e-5, atol=1e-6)
