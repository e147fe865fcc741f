"""Parameters without a rule: all ways to their per-example gradients agree."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.foundations.cotangents import LossGradient
from layerwise.foundations.likelihoods import resolve
from layerwise.foundations.random import stream
from layerwise.layers.capture.recorder import Batch, ModelRecorder
from layerwise.layers.capture.vectorised import mixture_of
from layerwise.layers.rules.generic import WAYS, ExampleGradients, is_random
from layerwise.layers.table import LayerTable
from layerwise.testing import case, oracles


def _arranged(t: Tensor) -> Tensor:
    return t.reshape(t.shape[0], -1, t.shape[-1])


def _truth(model: nn.Module, x: Tensor, v: Tensor) -> dict[str, Tensor]:
    """{parameter: [V, N, *shape]} from the dense Jacobian."""
    J = oracles.jacobian(model, x).reshape(v.shape[1], -1, oracles.flat_parameters(model).numel())
    rows = torch.einsum("vnk,nkd->vnd", v.flatten(2), J)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    return {name: rows[..., s].unflatten(-1, shapes[name]) for name, s in oracles.parameter_slices(model).items()}


def _setting(name: str, vectors: int = 2) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    model, x, _ = case(name).make()
    f = _arranged(model(x))
    v = torch.randn(vectors, *f.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return model, x, f, v


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["bare_parameters", "prelu", "lstm"])
def test_every_way_is_right_or_says_that_it_cannot(name: str, way: str):
    model, x, f, v = _setting(name)
    gradients = ExampleGradients(model, list(dict(model.named_parameters())), 0)
    expected = _truth(model, x, v)
    if way == "vmap" and name != "bare_parameters":
        with pytest.raises(RuntimeError):
            gradients._vmap(x, f, v, _arranged)
        return
    if way == "graph":
        rows = gradients._graph(f, v)
    else:
        rows, alone = getattr(gradients, f"_{way}")(x, f, v, _arranged)
        assert torch.allclose(alone, f)
    assert max(float((rows[k] - expected[k]).abs().max()) for k in expected) < 1e-10


@pytest.mark.parametrize("vectors", [1, 2, 4, 5])
@pytest.mark.parametrize("name", ["bare_parameters", "prelu", "lstm", "gru"])
def test_the_way_taken_is_right(name: str, vectors: int):
    """`vmap` of PReLU fails for most numbers of cotangents in torch 2.13, and is silently wrong for the others."""
    model, x, f, v = _setting(name, vectors)
    gradients = ExampleGradients(model, list(dict(model.named_parameters())), 0)
    rows = gradients.rows(x, f, v, _arranged)
    expected = _truth(model, x, v)
    assert max(float((rows[k] - expected[k]).abs().max()) for k in expected) < 1e-10
    assert gradients.way == ("vmap" if name == "bare_parameters" else "loop")


def _hidden_from_the_first_mixture(rows: Tensor) -> Tensor:
    m = mixture_of(rows, 2)
    wrong = rows.clone()
    wrong[0, 0] += m[0, 1]
    wrong[0, 1] -= m[0, 0]
    return wrong


WRONG = {
    "all of it": torch.ones_like,
    "the examples' order": lambda rows: rows.flip(1),
    "the cotangents' order": lambda rows: rows.flip(0),
    "all cotangents but the first": lambda rows: rows[:1].expand_as(rows),
    "what one mixture does not see": _hidden_from_the_first_mixture,
}


@pytest.mark.parametrize("what", WRONG)
def test_a_way_that_does_not_add_up_is_left(monkeypatch: pytest.MonkeyPatch, what: str):
    """Shapes and outputs are right, so that the mixtures alone can tell."""
    model, x, f, v = _setting("bare_parameters")
    gradients = ExampleGradients(model, ["scale"], 0)
    truth = _truth(model, x, v)["scale"]
    monkeypatch.setattr(gradients, "_vmap", lambda *_: ({"scale": WRONG[what](truth)}, f.detach()))
    rows = gradients.rows(x, f, v, _arranged)
    assert gradients.way == "loop"
    assert (rows["scale"] - truth).abs().max() < 1e-10


def test_a_parameter_the_output_does_not_depend_on():
    model, x, f, v = _setting("unused_parameters")
    rows = ExampleGradients(model, ["spare", "idle.weight"], 0).rows(x, f, v, _arranged)
    assert rows["spare"].shape == (2, 4, 2)
    assert not rows["spare"].any()
    assert not rows["idle.weight"].any()


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.drop, self.head = nn.Parameter(torch.randn(4)), nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(x * self.scale))


def test_dropout_in_train_mode_uses_the_batchs_own_draws():
    model = Dropping().double().train()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
    law = resolve("categorical")
    recorder = ModelRecorder(model, LayerTable.from_model(model), seed=3)
    with torch.random.fork_rng():
        torch.manual_seed(stream(3, "forward", 0).initial_seed())
        losses = F.cross_entropy(model(x), y, reduction="none")
    parameters = dict(model.named_parameters())
    truth = [torch.autograd.grad(loss, list(parameters.values()), retain_graph=True) for loss in losses]
    with recorder.session():
        recorded = recorder.record(Batch(x, y, None, 0), law)
        v = LossGradient(law).slice(recorded.terms, 0, 1, 0)
        blocks = {name: io.rows() for name, io in recorded.all_layers(v, last=True).items()}
    rows = recorder.table.to_params(blocks)
    for name, grads in zip(parameters, zip(*truth, strict=True), strict=True):
        assert (rows[name][0] - torch.stack(grads)).abs().max() < 1e-10
    dropped = (rows["scale"][0] == 0).any(1)
    assert dropped.any()  # some inputs were dropped, and their scale got no gradient


def test_a_random_forward_takes_the_batchs_own_graph():
    model = Dropping().double().train()
    x = torch.randn(5, 4, dtype=torch.float64)
    f = _arranged(model(x))
    v = torch.randn(2, *f.shape, dtype=torch.float64)
    gradients = ExampleGradients(model, ["scale"], 0)
    rows = gradients.rows(x, f, v, _arranged)["scale"]
    assert gradients.way == "graph"
    for n in range(5):
        truth = torch.autograd.grad(f[n], model.scale, v[1, n], retain_graph=True)[0]
        assert (rows[1, n] - truth).abs().max() < 1e-12


def test_what_counts_as_random():
    assert is_random(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)).train())
    assert not is_random(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)).eval())
    assert not is_random(nn.Sequential(nn.Dropout(0.0)).train())
    assert is_random(nn.MultiheadAttention(4, 2, dropout=0.1).train())
    assert not is_random(nn.MultiheadAttention(4, 2).train())


def test_parameters_and_layers_named_like_a_rate_are_none():
    model = nn.Module()
    model.p, model.dropout = nn.Parameter(torch.ones(3)), nn.Dropout(0.0)
    assert not is_random(model.train())
    model.dropout.p = 0.5
    assert is_random(model)
