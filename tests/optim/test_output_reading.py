"""The likelihood, by the gradient at the model's output."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.statistics.output import draw_some, read

pytestmark = pytest.mark.usefixtures("untyped")
N, C = 24, 7


def reading(loss: Callable[[Tensor], Tensor], *shape: int, dtype: torch.dtype = torch.float32, spread: float = 1.0):
    f = (spread * torch.randn(*shape, generator=torch.Generator().manual_seed(0))).to(dtype).requires_grad_()
    (g,) = torch.autograd.grad(loss(f), f)
    return read(f.detach(), g)


LABELS = torch.arange(N) % C
VALUES = torch.rand(N, C, generator=torch.Generator().manual_seed(1))
GREY = VALUES * (VALUES > 0.4)
"""Images with a dark background."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("spread", [1.0, 0.0])
def test_categorical(dtype: torch.dtype, spread: float):
    found = reading(lambda f: 5 * F.cross_entropy(f, LABELS), N, C, dtype=dtype, spread=spread)
    assert found is not None
    assert found.law == "categorical"
    assert found.scale == pytest.approx(5 / N, rel=0.05 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(
    ("loss", "shape", "rows"),
    [
        (lambda f: F.cross_entropy(f, LABELS, reduction="sum"), (N, C), N),
        (lambda f: F.cross_entropy(f.flatten(0, 1), LABELS, reduction="sum"), (N // 4, 4, C), N),
        (lambda f: F.cross_entropy(f, LABELS.view(2, 3, 4), reduction="sum"), (2, C, 3, 4), N),
        (lambda f: F.cross_entropy(f, torch.where(LABELS == 3, -100, LABELS), reduction="sum"), (N, C), N - 3),
        (lambda f: F.cross_entropy(f, LABELS % 2, reduction="sum"), (N, 2), N),
    ],
    ids=["sum", "tokens", "pixels", "ignored", "two classes"],
)
def test_reductions_and_layouts(loss: Callable[[Tensor], Tensor], shape: tuple[int, ...], rows: int):
    found = reading(loss, *shape)
    assert found is not None
    assert (found.law, found.rows) == ("categorical", rows)
    assert found.scale == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("spread", [0.0, 0.03, 1.0, 4.0])
@pytest.mark.parametrize("smoothing", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("classes", [3, 10])
def test_smoothed_labels(classes: int, smoothing: float, spread: float):
    """Of outputs that are all alike, c and ε cannot be told apart: then their product is the scale."""
    y = torch.arange(N) % classes
    found = reading(
        lambda f: 5 * F.cross_entropy(f, y, label_smoothing=smoothing, reduction="sum"), N, classes, spread=spread
    )
    assert found is not None
    assert (found.law, found.rows) == ("categorical", N)
    assert found.scale == pytest.approx(
        5.0 if spread >= 1 else 5.0 * (1 - smoothing / 2), rel=1e-3 + (spread < 1) * 0.3
    )


def test_mixed_targets_are_not_labels():
    mixed = 0.6 * F.one_hot(LABELS, C) + 0.4 * F.one_hot(LABELS.roll(1), C)
    found = reading(lambda f: F.cross_entropy(f, mixed.float()), N, C)
    assert found is not None
    assert found.law is None


def test_log_probabilities():
    f = torch.randn(N, C).log_softmax(-1).requires_grad_()
    (g,) = torch.autograd.grad(F.nll_loss(f, LABELS), f)
    found = read(f.detach(), g)
    assert found is not None
    assert found.law == "categorical"
    assert found.scale == pytest.approx(1 / N, rel=1e-5)


def test_weights_of_classes_leave_no_single_scale():
    found = reading(lambda f: F.cross_entropy(f, LABELS, weight=torch.linspace(0.1, 3, C)), N, C)
    assert found is not None
    assert (found.law, found.scale) == ("categorical", None)


@pytest.mark.parametrize("targets", [GREY, (GREY > 0).float()], ids=["grey", "binary"])
def test_bernoulli(targets: Tensor):
    found = reading(lambda f: 3 * F.binary_cross_entropy_with_logits(f, targets, reduction="sum"), N, C)
    assert found is not None
    assert found.law == "bernoulli"
    assert found.scale == pytest.approx(3.0, rel=1e-2)


@pytest.mark.parametrize(
    "loss",
    [
        lambda f: F.mse_loss(f, VALUES),
        lambda f: F.mse_loss(f, F.one_hot(LABELS, C).float()),
        lambda f: F.smooth_l1_loss(f, VALUES),
        lambda f: f.square().sum(1).mean(),
        lambda f: F.cross_entropy(f, LABELS) + 0.3 * f.square().mean(),
        lambda f: f.sigmoid().sub(VALUES).square().sum(),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_others_are_neither(loss: Callable[[Tensor], Tensor], dtype: torch.dtype):
    found = reading(lambda f: loss(f.float()), N, C, dtype=dtype)
    assert found is not None
    assert found.law is None


def test_nothing_is_read_from_nothing():
    f = torch.randn(N, C)
    assert read(f, torch.zeros(N, C)) is None
    assert read(f, torch.full((N, C), torch.nan)) is None


def test_outputs_that_are_all_zero_are_looked_at_again():
    """There a square loss with targets ±1 has the gradient of a Bernoulli one."""
    found = reading(lambda f: F.mse_loss(f, (VALUES > 0.5).float() * 2 - 1), N, C, spread=0.0)
    assert found is not None
    assert (found.law, found.sure) == (None, False)


# --- in an optimizer ---------------------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, C))


def step(opt: torch.optim.Optimizer, model: nn.Module, loss: Callable[[Tensor], Tensor], seed: int = 0) -> None:
    opt.zero_grad()
    loss(model(torch.randn(N, 6, generator=torch.Generator().manual_seed(seed)))).backward()
    opt.step()


@pytest.mark.parametrize("name", ["KFAC", "EKFAC", "MahalanobisSpectral"])
def test_labels_are_drawn_once_the_likelihood_is_known(name: str):
    model = net()
    opt = getattr(lw.optim, name)(model)
    assert "likelihood=auto (not seen yet)" in repr(opt)
    step(opt, model, lambda f: F.cross_entropy(f, LABELS))
    assert "likelihood=auto (categorical)" in repr(opt)
    assert "estimator=sampled" in repr(opt)
    other = getattr(lw.optim, name)(model)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert "likelihood=auto (categorical)" in repr(other)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
@pytest.mark.parametrize("name", ["KFAC", "EKFAC", "MahalanobisSpectral"])
def test_a_copy_goes_on_with_the_likelihood_that_was_recognised(name: str, how: Callable[[Any], Any]):
    model = net()
    opt = getattr(lw.optim, name)(model)
    step(opt, model, lambda f: F.cross_entropy(f, LABELS))
    twin, copied = how((model, opt))
    assert "likelihood=auto (categorical)" in repr(copied)
    for each, own in ((opt, model), (copied, twin)):
        step(each, own, lambda f: F.cross_entropy(f, LABELS), 1)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_state_that_had_seen_nothing_is_gone_back_to():
    model = net()
    opt = lw.optim.KFAC(model)
    fresh = copy.deepcopy(opt.state_dict())
    step(opt, model, lambda f: F.cross_entropy(f, LABELS))
    opt.load_state_dict(fresh)
    assert "likelihood=auto (not seen yet)" in repr(opt)
    assert "estimator=empirical" in repr(opt)
    step(opt, model, lambda f: F.cross_entropy(f, LABELS), 1)
    assert "likelihood=auto (categorical)" in repr(opt)
    step(opt, model, lambda f: F.cross_entropy(f, LABELS), 2)


def test_the_empirical_fisher_is_chosen_or_warned_of():
    model = net()
    opt = lw.optim.KFAC(model)
    with pytest.warns(UserWarning, match='empirical Fisher matrix.*"gaussian" for a square loss'):
        step(opt, model, lambda f: F.mse_loss(f, VALUES))
    step(opt, model, lambda f: F.mse_loss(f, VALUES), 1)  # once
    assert "likelihood=auto (empirical)" in repr(opt)
    chosen: list[dict[str, Any]] = [{"estimator": "empirical"}, {"likelihood": "gaussian"}, {"scale": "formula"}]
    for options in chosen:
        step(lw.optim.KFAC(model, **options), model, lambda f: F.mse_loss(f, VALUES))


def test_a_backward_without_a_step_decides_nothing():
    model = net()
    opt = lw.optim.KFAC(model)
    F.mse_loss(model(torch.randn(N, 6)), VALUES).backward()
    step(opt, model, lambda f: F.cross_entropy(f, LABELS))
    assert "likelihood=auto (categorical)" in repr(opt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 5), (4, 6, 2000), (4, 5, 3, 3)])
@pytest.mark.parametrize("law", ["categorical", "bernoulli"])
def test_labels_that_nobody_wants(law: str, shape: tuple[int, ...], dtype: torch.dtype):
    """Of any output that may be recognised, and of no random numbers but their own."""
    state, f = torch.get_rng_state(), torch.ones(shape, dtype=dtype)
    classes = shape[1] if len(shape) != 3 else shape[2]
    assert draw_some(law, f).shape == (2, 1, classes)
    assert torch.equal(torch.get_rng_state(), state)
