"""Precision and the generic path: float64, float32, bfloat16, autocast; layers without a rule."""

import copy

import pytest
import torch
from kernel_tools import close, convnet, features, gaussian, mlp, relative
from torch import Tensor, nn

import layerwise as lw
from layerwise.kernel.assemble import COLUMNS
from layerwise.testing import case, oracles


@pytest.mark.parametrize("algorithm", ["auto", "gram", "chain", "product", "rows"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.usefixtures("untyped")
def test_lower_precision_is_near_float64(dtype: torch.dtype, tolerance: float, algorithm: str):
    """The oracle runs the rounded model and inputs, in float64."""
    model, x = convnet().to(dtype), gaussian(6, 2, 6, 6).to(dtype)
    K, expected = lw.ntk(model, x, algorithm=algorithm), oracles.ntk(model, x)
    assert K.dtype == K.matrix().dtype == torch.float32
    close(K.matrix(), expected, tolerance)
    K = lw.ntk(model, x, x[:2], algorithm=algorithm)
    close(K.matrix(), expected[:, :6], tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("name", ["mlp", "layer_norm", "embedding", "attention", "lstm", "bare_parameters"])
@pytest.mark.usefixtures("untyped")
def test_products_and_diagonals_in_lower_precision(name: str, dtype: torch.dtype, tolerance: float):
    model, x, _ = case(name).make()
    model = model.to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    expected = oracles.ntk(model, x)
    K, u = lw.ntk(model, x), gaussian(len(expected)).float()
    close(K.diag(), expected.diagonal(), tolerance)
    close(K @ u, expected @ u.double(), tolerance)
    close(K.matrix(), expected, tolerance)
    assert (K @ u).dtype == K.diag().dtype == torch.float32


def test_a_long_sum_keeps_its_digits():
    """100,000 parameters in float32, rows kept."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(400, 250), nn.Tanh(), nn.Linear(250, 1)), torch.randn(4, 400)
    expected, J = oracles.ntk(model, x), features(copy.deepcopy(model).double(), x.double())
    # Sums are cut into parts of COLUMNS entries; inside a part it is the BLAS that adds, and some (MKL for the oldest
    # instruction sets) add one by one. A whole sum may lose no more digits than this machine's BLAS does in one part.
    part = J[:, :COLUMNS]
    rounded = part.mT.float().contiguous()  # as they are kept
    lost = relative(rounded.mT @ rounded, rounded.double().mT @ rounded.double())
    tolerance = max(1e-6, 2 * lost)
    close(lw.ntk(model, x, algorithm="rows").matrix(), expected, tolerance)
    close(lw.ntk(model, x, algorithm="gram").matrix(), expected, tolerance)


def test_autocast_is_the_models_own():
    model, x = mlp(3, 8, 2).float(), gaussian(5, 3).float()
    plain = lw.ntk(model, x).matrix()
    with torch.autocast("cpu", torch.bfloat16):
        K = lw.ntk(model, x)
        assert K.matrix().dtype == torch.float32
    error = relative(K.matrix(), plain)
    assert 0 < error < 5e-2


def test_inference_mode_changes_nothing():
    model, x = mlp(3, 4, 2), gaussian(5, 3)
    u = gaussian(10)
    # The reference differentiates by itself, which inference mode forbids (torch 2.11 then gives zeros).
    expected, pulled_back = oracles.ntk(model, x), features(model, x).mT @ u
    with torch.inference_mode():
        K = lw.ntk(model, x)
        close(K @ u, expected @ u)
        close(K.matrix(), expected)
        close(lw.jacobian(model, x).T @ u, pulled_back)


def test_float64_differences_of_nearby_kernels():
    """A kernel that changes by 1e-9 of itself is seen to change by that."""
    model, x = mlp(3, 4, 2), gaussian(5, 3)
    before = lw.ntk(model, x).matrix()
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-9
    change = lw.ntk(model, x).matrix() - before
    assert 1e-12 < float(change.norm() / before.norm()) < 1e-7


# --- layers without a rule ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "generic"),
    [
        ("lstm", {"0.net.weight_ih_l0", "0.net.weight_hh_l0", "0.net.bias_ih_l0", "0.net.bias_hh_l0"}),
        ("bare_parameters", {"scale", "position"}),
        ("prelu", {"1.weight"}),
        ("mlp", set()),
    ],
)
def test_layers_without_a_rule_are_named_in_the_plan(name: str, generic: set[str]):
    model, x, _ = case(name).make()
    plan = lw.ntk(model, x).plan()
    assert {layer.spec.name for layer in plan.layers if layer.sizes.bare} == generic
    lines = str(plan).splitlines()
    assert {line.split()[0] for line in lines if "per-example gradients by autodiff" in line} == generic
    assert all(layer.keeps_rows and layer.order == "rows" for layer in plan.layers if layer.sizes.bare)


def test_the_plan_gives_the_reason():
    model, x, _ = case("lstm").make()
    assert "LSTM has no layer rule" in str(lw.ntk(model, x).plan())


class Idle(nn.Module):
    """A layer that is never called, and one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.work = nn.Linear(3, 7), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.work(x)


def test_a_layer_that_is_not_called_has_kernel_zero():
    model, x = Idle().double(), gaussian(4, 3)
    parts = lw.ntk(model, x).per_layer()
    assert not parts["idle"].matrix().any()
    close(parts["work"].matrix(), oracles.ntk(model, x))
    assert "idle" in str(lw.ntk(model, x).plan())
