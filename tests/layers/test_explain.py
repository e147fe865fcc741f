"""`check="always"`: gradients of a graph that is known, compared in the backward that is made anyway."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.errors import UnsupportedError
from layerwise.layers.capture import recorder
from layerwise.layers.capture.explain import Explanation
from layerwise.layers.io.layer_io import RecordedIO
from layerwise.testing import cases

ESTIMATORS = ("exact", "sampled", "empirical")


class Doubling(nn.Module):
    """A hook on a tensor is no part of autograd's graph: whether there is one cannot be seen in it."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.how = SimpleNamespace(doubles=False, layer=layer)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if self.how.doubles and self.how.layer == "body" and h.requires_grad:
            h.register_hook(lambda g: 2 * g)
        f = self.head(h.tanh())
        if self.how.doubles and self.how.layer == "head" and f.requires_grad:
            f.register_hook(lambda g: 2 * g)
        return f


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    return x, torch.randn(5, 2, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("structure", ["diag", "lowrank"])
@pytest.mark.parametrize("layer", ["body", "head"])
def test_what_a_graph_does_not_tell_is_an_error_that_names_the_layer(layer: str, structure: Any, estimator: Any):
    """And what was known of the graph is forgotten: the next call is right."""
    model = Doubling(layer).double()
    x, y = _data()

    def call(check: Any) -> Any:
        return lw.fisher(model, (x, y), "gaussian", structure, estimator, check=check)

    call("always")
    call("always")
    model.how.doubles = True
    if (layer, estimator) == ("body", "exact"):  # autograd hands out gradients of many cotangents after their hooks
        found = call("always")
    else:
        with pytest.raises(UnsupportedError, match=layer):
            call("always")
        found = call("first")
    if estimator != "sampled":
        expected = _diagonal(model, x, y, estimator)
        assert (found.diagonal().flat() - expected).abs().max() < 1e-9 * expected.abs().max()


@pytest.mark.parametrize("how", ["autocast", "parameters"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gross_errors_are_noticed_in_bfloat16(estimator: Any, how: str, monkeypatch: pytest.MonkeyPatch):
    """What rounding may add up to is less than what inputs three times as large do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    x, y = torch.randn(32, 8), torch.randint(4, (32,))
    if how == "parameters":
        model, x = model.to(torch.bfloat16), x.to(torch.bfloat16)

    def call() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            return lw.fisher(model, (x, y), "categorical", "diag", estimator, check="always")

    for _ in range(3):
        call()
    times = RecordedIO.grad_times
    monkeypatch.setattr(RecordedIO, "grad_times", lambda io, q, m: tuple(3 * part for part in times(io, q, m)))
    with pytest.raises(UnsupportedError, match="explain another gradient"):
        call()


def _diagonal(model: nn.Module, x: Tensor, y: Tensor, estimator: str) -> Tensor:
    """1/N Σ_n of the squares of J, or of the gradients of ‖f − y‖²/2, one plain backward each."""
    total, parameters = torch.zeros(sum(p.numel() for p in model.parameters())).double(), list(model.parameters())
    for n in range(len(x)):
        f = model(x[n : n + 1])[0]
        u = torch.eye(2).double() if estimator == "exact" else (f - y[n]).detach().unsqueeze(0)
        for row in u:
            grads = torch.autograd.grad(f, parameters, row, retain_graph=True)
            total += torch.cat([g.flatten() for g in grads]).square()
    return total / len(x)


KINDS = (
    "mlp",
    "conv2d",
    "conv_transpose2d",
    "layer_norm",
    "embedding",
    "attention",
    "language_model",
    "bare_parameters",
)


@pytest.mark.parametrize("name", KINDS)
def test_layers_of_every_type_are_explained(name: str, monkeypatch: pytest.MonkeyPatch):
    """Every recorded layer is looked at, none is verified again, and the numbers are those without a look."""
    case = cases.case(name)
    model, x, y = case.make()
    looked, verified = [], []
    settle, verify = Explanation.settle, recorder.verify
    monkeypatch.setattr(
        Explanation, "settle", lambda self, *args: looked.append(len(self._pulled)) or settle(self, *args)
    )
    for estimator in ("exact", "empirical"):
        results = []
        for check in ("first", "always"):
            if check == "always":
                monkeypatch.setattr(recorder, "verify", lambda *args: verified.append(1) or verify(*args))
            M: Any = lw.fisher(model, (x, y), case.likelihood, "diag", estimator, check=check, **case.options)
            results.append(M.diagonal().flat())
        monkeypatch.setattr(recorder, "verify", verify)
        assert torch.allclose(*results, rtol=1e-10, atol=1e-14)
        recorded = [spec for spec in M.table.layers if spec.sites]
        assert looked[-1] == len(recorded)
    assert not verified or name == "bare_parameters"


@pytest.mark.parametrize("name", ["mlp", "conv2d", "layer_norm", "embedding"])
def test_gradients_times_a_vector_without_the_gradients(name: str, monkeypatch: pytest.MonkeyPatch):
    case = cases.case(name)
    model, x, y = case.make()
    times, seen = RecordedIO.grad_times, []

    def compared(self: RecordedIO, q: Tensor, mixture: Tensor) -> tuple[Tensor, Tensor]:
        found, terms = times(self, q, mixture)
        expected = torch.einsum("v,vkoi,ki->ko", mixture, self.grad(), q)
        assert torch.allclose(found, expected, atol=1e-12)
        count = self.examples * sum(call.sharing(self.examples) for call in self.calls)
        assert float(expected.norm()) <= float(terms) * count**0.5 * (1 + 1e-9)  # Cauchy–Schwarz
        seen.append(self.spec.name)
        return found, terms

    monkeypatch.setattr(RecordedIO, "grad_times", compared)
    lw.fisher(model, (x, y), case.likelihood, "diag", "exact", check="always", **case.options)
    assert seen
