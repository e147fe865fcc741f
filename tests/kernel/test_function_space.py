"""What binds function space to parameter space: one spectrum, one set of features."""

import pytest
import torch
from kernel_tools import close, convnet, features, gaussian
from torch import Tensor

import layerwise as lw
from layerwise.testing import CASES, case

pytestmark = pytest.mark.usefixtures("untyped")
NAMES = ("mlp", "deep_linear_bias", "residual_cnn", "layer_norm", "tied_weights", "lstm")


def _metric(name: str) -> tuple[Tensor, lw.Kernel, int]:
    """n times the L2 metric, the kernel, and n."""
    model, x, _ = case(name).make()
    f = model(x)
    F = lw.fisher(model, (x, torch.zeros_like(f)), likelihood="gaussian", structure="dense", estimator="exact")
    return len(f) * F.to_dense(), lw.ntk(model, x), len(f)


@pytest.mark.parametrize("name", NAMES)
def test_n_times_the_metric_has_the_spectrum_of_the_kernel(name: str):
    metric, K, _ = _metric(name)
    ours, other = K.eigenvalues().flip(0), torch.linalg.eigvalsh(metric).flip(0)
    r = min(len(ours), len(other))
    close(ours[:r], other[:r])
    for rest in (ours[r:], other[r:]):
        assert float(rest.abs().max() if len(rest) else 0.0) <= 1e-10 * float(ours[0])
    close(K.trace(), metric.trace())
    close(K.frobenius(), metric.norm())


@pytest.mark.parametrize("name", NAMES)
def test_pulling_back_and_pushing_forward_is_the_kernel(name: str):
    model, x, _ = case(name).make()
    J, K = lw.jacobian(model, x), lw.ntk(model, x)
    u = gaussian(J.shape[0], 2)
    close(J @ (J.T @ u), K @ u)
    close(J @ (J.T @ u), K.matrix() @ u)


@pytest.mark.parametrize("name", NAMES)
def test_pushing_forward_and_pulling_back_is_n_times_the_metric(name: str):
    metric, _, _ = _metric(name)
    model, x, _ = case(name).make()
    J, v = lw.jacobian(model, x), gaussian(len(metric))
    close(J.T @ (J @ v), metric @ v)


def test_every_case_has_a_positive_semi_definite_kernel():
    for c in CASES[::8]:
        model, x, _ = c.make()
        values = lw.ntk(model, x).eigenvalues()
        assert float(values[0]) >= -1e-12 * float(values[-1])


def test_the_kernel_is_first_order_in_a_gradient_step():
    """df = −η K (f − y) + O(η²) for a step on ½‖f − y‖²."""
    model, x, y = convnet(), gaussian(5, 2, 6, 6), gaussian(5, 3, seed=1)
    K, f = lw.ntk(model, x).matrix(), model(x).detach()
    step = -1e-6 * (features(model, x).mT @ (f - y).flatten())
    lw.ParamVector.from_flat(step, model).add_to(model)
    close((model(x) - f) / 1e-6, -(K @ (f - y).flatten()).view(5, 3), 1e-4)
