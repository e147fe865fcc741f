"""The error of the Kronecker approximation, formed and matrix-free."""

import pytest
import torch
from hessian_models import batch, convolutional, gauss_newton_of, images, mlp
from torch import nn

from layerwise.foundations.errors import InputError
from layerwise.structure import decoupled, decoupling_error, layer_hessian, relative_error
from layerwise.structure import decoupling as module


def test_both_norms():
    net, data = mlp(), batch()
    H, K = gauss_newton_of(net, data, "2.weight"), decoupled(net, data, "2").dense()
    found = decoupling_error(net, data, "2")
    assert found.spectral == pytest.approx(float(torch.linalg.matrix_norm(K - H, 2) / torch.linalg.matrix_norm(H, 2)))
    assert found.frobenius == pytest.approx(float((K - H).norm() / H.norm()))
    assert found.exact


@pytest.mark.parametrize(("model", "data", "layer"), [(mlp, batch, "2"), (convolutional, images, "3")])
def test_matrix_free_is_the_same_within_what_it_states(model, data, layer, monkeypatch):
    net, given = model(), data()
    truth = decoupling_error(net, given, layer)
    monkeypatch.setattr(module, "WHOLE", 10)
    formed = decoupling_error(net, given, layer)
    assert formed.exact
    assert formed.spectral == pytest.approx(truth.spectral, rel=1e-7)
    assert formed.frobenius == truth.frobenius
    monkeypatch.setattr(module, "DENSE", 10)
    found = decoupling_error(net, given, layer, samples=20)
    assert abs(found.spectral - truth.spectral) <= found.spectral_uncertainty + 1e-6
    assert abs(found.frobenius - truth.frobenius) <= 5 * found.frobenius_uncertainty
    assert 0 < found.frobenius_uncertainty < 0.5 * found.frobenius
    assert not found.exact


def test_one_example_is_exactly_a_kronecker_product():
    error = decoupling_error(mlp(), batch(1), "2")
    assert error.spectral <= 1e-12
    assert error.frobenius <= 1e-12


def test_a_norm_that_has_not_converged_says_how_far_it_may_be():
    values = torch.linspace(-1.2, 1, 300, dtype=torch.float64)
    like = torch.zeros((), dtype=torch.float64)
    far, error = module.spectral_norm(lambda X: values.unsqueeze(1) * X, 300, like, 1e-9, 8, 0)
    assert 1e-3 < error < 1
    assert (values.abs() - far).abs().min() <= error  # an eigenvalue is that near
    near, error = module.spectral_norm(lambda X: values.unsqueeze(1) * X, 300, like, 1e-9, 300, 0)
    assert near == pytest.approx(1.2, abs=1e-8)
    assert error <= 1e-8


def test_bad_input():
    net, data = mlp(activation=nn.Tanh), batch()
    with pytest.raises(InputError, match="gauss_newton"):
        decoupling_error(net, data, "2")
    assert decoupling_error(net, data, "2", gauss_newton=True).spectral > 0
    with pytest.raises(InputError, match="the same layer"):
        relative_error(layer_hessian(net, data, "2", gauss_newton=True), decoupled(net, data, "2", bias=True))
