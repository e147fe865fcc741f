"""Every member with its default options trains small classifiers: nothing to tune before the first success."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise as lw
from layerwise import data
from thinning import thinned

pytestmark = pytest.mark.usefixtures("untyped")
STEPS = 80
OPTIONS = {"SGD": {"lr": 0.3}, "SOAP": {"lr": 3e-3}, "MahalanobisSpectral": {"lr": 3e-3}}
"""Whose defaults are more cautious: SGD's is torch's, and SOAP and the spectral step in the metric of the inputs begin
slowly on pixels that are always zero: behind AdamW in the first hundred steps, ahead of it later (decision 20)."""
MEMBERS = [
    "SGD", "Adam", "KFAC", "EKFAC", "FOOF", "LocoProp", "NGD", "Shampoo", "SOAP", "Muon", "Sign", "MahalanobisSpectral"
]  # fmt: skip
QUICKLY = ("KFAC", "FOOF", "Shampoo")
"""Which train a convolutional network in every run of the tests; the others where there is more time."""


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    pytest.importorskip("sklearn")
    images = data.digits()
    return images.x[:1500], images.y[:1500]


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def losses(opt: torch.optim.Optimizer, model: nn.Module, digits: tuple[Tensor, Tensor], steps: int) -> list[float]:
    x, y = digits
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(steps):
        chosen = torch.randint(len(x), (100,), generator=generator)
        opt.zero_grad()
        loss = F.cross_entropy(model(x[chosen]), y[chosen])
        loss.backward()
        opt.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("name", "make"),
    [
        *((name, dense) for name in MEMBERS),
        *((name, convolutional) for name in QUICKLY),
        *(pytest.param(name, convolutional, marks=pytest.mark.slow) for name in MEMBERS if name not in QUICKLY),
    ],
)
def test_defaults_train(name: str, make, digits: tuple[Tensor, Tensor]):
    model = make()
    opt = getattr(lw.optim, name)(model, **OPTIONS.get(name, {}))
    found = losses(opt, model, digits, STEPS)
    assert max(found) < 2.5 * found[0]
    assert sum(found[-5:]) / 5 < 0.8 * found[0]


@pytest.mark.parametrize("rate", [0.1, *(pytest.param(rate, marks=pytest.mark.slow) for rate in (0.03, 0.003))])
@pytest.mark.parametrize(("name", "options"), thinned(["KFAC", "EKFAC"], [{}, {"likelihood": "categorical"}]))
def test_clipping_makes_a_wide_range_of_rates_work(
    name: str, options: dict, rate: float, digits: tuple[Tensor, Tensor]
):
    """Without it K-FAC diverges at each of these rates, and EKFAC at most of them with drawn labels."""
    model = convolutional()
    opt = getattr(lw.optim, name)(model, lr=rate, damping=1e-2, **options, scale="formula")
    found = losses(opt, model, digits, STEPS)
    assert max(found) < 5 * found[0]
    assert sum(found[-5:]) / 5 < 0.5 * found[0]


def test_without_the_clip_the_same_run_diverges(digits: tuple[Tensor, Tensor]):
    model = convolutional()
    opt = lw.optim.KFAC(model, lr=0.1, damping=1e-2, clip=None, scale="formula")
    assert max(losses(opt, model, digits, 30)) > 20
