"""Sign similarity, kernel and representation alignment: definitions, any kind of ReLU, and models left as they were."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import layerwise as lw
from layerwise.foundations.errors import InputError
from layerwise.regimes import (
    kernel_alignment,
    relu_signs,
    representation,
    representation_alignment,
    sign_similarity,
)


class Functional(nn.Module):
    """ReLUs of all kinds, and a clamp that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5, dtype=torch.float64) for _ in range(6))
        self.module = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kinds = (
            torch.relu,
            functional.relu,
            lambda h: h.relu(),
            lambda h: h.clamp(min=0),
            lambda h: functional.relu(h, inplace=True),
            self.module,
        )
        for layer, kind in zip(self.layers, kinds, strict=True):
            x = kind(layer(x))
        return x.clamp(-10, 10).clamp(min=0.5)


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)).double()


X = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def test_every_kind_of_relu_is_seen():
    signs = relu_signs(Functional(), X)
    assert [tuple(s.shape) for s in signs] == [(12, 5)] * 6
    assert all(s.dtype == torch.bool for s in signs)


def test_signs_are_those_of_the_units():
    model = network()
    h1 = model[0](X)
    h2 = model[2](h1.relu())
    first, second = relu_signs(model, X)
    assert torch.equal(first, h1 > 0)
    assert torch.equal(second, h2 > 0)


def test_zero_is_inactive():
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU()).double()
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.copy_(torch.tensor([0.0, 1.0, -1.0, 0.0]))
    (signs,) = relu_signs(model, X)
    assert signs[0].tolist() == [False, True, False, False]


def test_similarity_counts_units_and_examples():
    model, other = network(), network(seed=1)
    a, b = relu_signs(model, X), relu_signs(other, X)
    expected = torch.cat([(p == q).flatten() for p, q in zip(a, b, strict=True)]).double().mean()
    assert sign_similarity(model, X, other) == pytest.approx(float(expected))
    assert sign_similarity(model, X, b) == pytest.approx(float(expected))
    assert sign_similarity(model, [X[:5], X[5:]], b) == pytest.approx(float(expected))
    assert sign_similarity(model, X, model) == 1.0


def test_kernel_alignment_is_the_uncentred_cosine():
    model, other = network(), network(seed=1)
    K, K0 = lw.ntk(model, X).matrix(), lw.ntk(other, X).matrix()
    expected = float((K * K0).sum() / (K.norm() * K0.norm()))
    assert kernel_alignment(model, X, other) == pytest.approx(expected)
    assert kernel_alignment(model, X, K0) == pytest.approx(expected)
    assert kernel_alignment(model, X, lw.ntk(other, X)) == pytest.approx(expected)
    assert 0 < expected < 0.999


def test_representation_is_the_input_of_the_last_linear_layer():
    model = network()
    phi = model[3](model[2](model[1](model[0](X)))).detach()
    assert torch.equal(representation(model, X), phi)
    other = network(seed=1)
    phi0 = representation(other, X)
    a, b = phi @ phi.mT, phi0 @ phi0.mT
    expected = float((a * b).sum() / (a.norm() * b.norm()))
    assert representation_alignment(model, X, other) == pytest.approx(expected)
    assert representation_alignment(model, X, phi0) == pytest.approx(expected)


def test_batches_are_joined_along_examples():
    """The released helper of the thesis joined features and formed their Gram matrix: correction 1."""
    model, other = network(), network(seed=1)
    together = representation_alignment(model, X, other)
    assert representation(model, [X[:4], X[4:]]).shape == (12, 6)
    for cut in (4, 6):
        assert representation_alignment(model, [X[:cut], X[cut:]], other) == pytest.approx(together)


def test_of_a_linearized_model():
    net = lw.linearized(network(), 2.0)
    start = copy.deepcopy(net.model)
    with torch.no_grad():
        for p in net.parameters():
            p += 0.3 * torch.randn_like(p)
    for measure in (sign_similarity, kernel_alignment, representation_alignment):
        assert measure(net, X) == pytest.approx(measure(net.model, X, start))
        assert measure(net, X) < 1
    limit = lw.linearized(network(), float("inf"))
    with torch.no_grad():
        for p in limit.parameters():
            p += 0.3 * torch.randn_like(p)
    for measure in (sign_similarity, kernel_alignment, representation_alignment):
        assert measure(limit, X) == pytest.approx(1, abs=1e-12)


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 3)).double()
    model[1].eval()
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    state = torch.get_rng_state()
    for measure in (sign_similarity, kernel_alignment, representation_alignment):
        measure(model, X, copy.deepcopy(model))
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_bad_input():
    model = network()
    with pytest.raises(InputError, match="start"):
        sign_similarity(model, X)
    with pytest.raises(InputError, match="ReLU"):
        relu_signs(nn.Sequential(nn.Linear(5, 3), nn.Tanh()).double(), X)
    with pytest.raises(InputError, match="linear layer"):
        representation(nn.ReLU(), X)
    with pytest.raises(InputError, match="same units"):
        sign_similarity(model, X, relu_signs(model, X[:3]))
    with pytest.raises(InputError, match="same examples"):
        representation_alignment(model, X, representation(model, X[:3]))
