"""`ModelRecorder` and what calls a model: everything is as it was afterwards, also when it fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.errors import InputError
from layerwise.layers.capture.model_call import call, example_count, output_tensor, substituted, take, undisturbed
from layerwise.testing import case


def _snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a call could change."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    return {
        "tensors": {k: t.detach().clone() for k, t in [*model.named_parameters(), *model.named_buffers()]},
        "identities": {k: id(p) for k, p in model.named_parameters(remove_duplicate=False)},
        "grads": {k: None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()},
        "requires_grad": {k: p.requires_grad for k, p in model.named_parameters()},
        "training": {k: m.training for k, m in model.named_modules()},
        "attributes": {k: sorted(vars(m)) for k, m in model.named_modules()},
        "hooks": {(k, h): list(getattr(m, h)) for k, m in model.named_modules() for h in hooks},
        "random": torch.get_rng_state(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "grad mode": torch.is_grad_enabled(),
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    before = _snapshot(model)
    yield
    after = _snapshot(model)
    for what in before:
        assert _same(before[what], after[what]), what


class Everything(nn.Module):
    """Dropout, attention, a buffer that counts, a norm, a bare parameter, a shared layer; may fail at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)
        self.norm, self.drop, self.scale = nn.LayerNorm(4), nn.Dropout(0.3), nn.Parameter(torch.ones(4))
        self.cell = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.head = self.again = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.drop(self.norm(self.mix(x, x, x)[0])) * self.scale
        f = self.head(self.cell(h).tanh())
        if self.fails and len(x) > 2:
            raise ArithmeticError("on purpose")
        return f


def _everything() -> tuple[Everything, tuple[Tensor, Tensor]]:
    model = Everything().double().train()
    model.norm.eval()
    model.head.bias.requires_grad_(False)
    model.scale.grad = torch.ones(4, dtype=torch.float64)
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    return model, (x, torch.randint(3, (3, 5)))


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diag", "lowrank", "dense"])
def test_the_model_is_left_as_it_was(structure: str):
    model, batch = _everything()
    with _unchanged(model):
        lw.fisher(model, batch, structure=structure)


@pytest.mark.parametrize("structure", ["kfac", "diag"])
def test_the_model_is_left_as_it_was_after_an_exception(structure: str):
    model, batch = _everything()
    model.fails = True
    with _unchanged(model), pytest.raises(ArithmeticError, match="on purpose"):
        lw.fisher(model, batch, structure=structure)


def test_the_model_is_left_as_it_was_after_bad_data():
    model, (x, y) = _everything()
    x[1, 2, 0] = torch.nan
    with _unchanged(model), pytest.raises(InputError, match="1 values that are NaN or infinite"):
        lw.fisher(model, (x, y))


@pytest.mark.parametrize("name", ["tied_weights", "lstm", "functional_reuse", "frozen_weight", "parametrized", "prelu"])
def test_special_models_are_left_as_they_were(name: str):
    model, x, y = case(name).make()
    with _unchanged(model):
        lw.fisher(model, (x, y), structure="block", estimator="exact")


class Normalizer(nn.Module):
    """Divides by a scale that its own forward updates, in place or by assignment."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.in_place = nn.Linear(4, 3), in_place
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach()
        if self.in_place:
            self.scale.mul_(1.5)
        else:
            self.scale = self.scale * 1.5
        return self.head(x) / self.scale


@pytest.mark.parametrize("structure", ["kfac", "diag"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_the_forward_changes_is_put_back_and_can_be_differentiated_through(in_place, structure):
    model = Normalizer(in_place).double()
    batch = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
    scale = model.scale
    with _unchanged(model):
        first, again = (lw.fisher(model, batch, structure=structure, estimator="exact").trace() for _ in range(2))
    assert model.scale is scale
    assert model.last is None
    assert torch.equal(first, again)


def test_dropout_is_the_same_at_every_call_and_another_for_another_seed():
    model, batch = _everything()
    first, again = (lw.fisher(model, batch, structure="diag", seed=1).trace() for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, lw.fisher(model, batch, structure="diag", seed=2).trace())


@pytest.mark.parametrize("signs", [(1.0, 1.0, 1.0), (1.0, -1.0, 1.0)], ids=["infinite", "NaN"])
def test_outputs_that_are_not_finite_are_refused(signs: tuple[float, ...]):
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(torch.inf)
    batch = torch.tensor(signs).expand(4, 3), torch.randint(2, (4,))
    with _unchanged(model), pytest.raises(InputError, match="output is NaN or infinite"):
        lw.fisher(model, batch)


# --- calling ----------------------------------------------------------------------------------------------


def test_substituted_reaches_modules_registered_twice_and_recurrent_layers():
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": shared, "b": shared, "tied": nn.Linear(3, 3), "rnn": nn.LSTM(3, 2)})
    model["tied"].weight = shared.weight
    flat = model["rnn"]._flat_weights
    new = {name: torch.full_like(p, 2.0) for name, p in model.named_parameters()}
    with _unchanged(model), substituted(model, new):
        assert model["b"].weight is new["a.weight"]
        assert model["tied"].weight is new["a.weight"]
        assert model["rnn"]._flat_weights[0] is new["rnn.weight_ih_l0"]
        assert model["b"](torch.ones(1, 3)).tolist() == [[8.0] * 3]
    assert model["rnn"]._flat_weights is flat
    with _unchanged(model), pytest.raises(KeyError), substituted(model, new):
        raise KeyError("inside")
    assert model["rnn"]._flat_weights is flat


def test_some_parameters_substituted_leave_the_others():
    model = nn.Linear(2, 2)
    bias = model.bias
    with substituted(model, {"weight": torch.zeros(2, 2)}):
        assert model.bias is bias
        assert torch.equal(model(torch.ones(1, 2))[0], bias)


def test_call_takes_tensors_tuples_and_mappings():
    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor | float = 0.0) -> Tensor:
            return a + b

    a, b = torch.ones(2), 2 * torch.ones(2)
    assert torch.equal(call(Sum(), a), a)
    assert torch.equal(call(Sum(), (a, b)), a + b)
    assert torch.equal(call(Sum(), {"a": a, "b": b}), a + b)


class Output(NamedTuple):
    ids: Tensor
    logits: Tensor


def test_the_output_is_found_in_what_a_model_returns():
    ids, logits = torch.arange(3), torch.ones(3)
    assert output_tensor(logits) is logits
    assert output_tensor((ids, logits)) is logits
    assert output_tensor({"loss": torch.zeros(()), "logits": logits}) is logits
    assert output_tensor(Output(ids, logits)) is logits
    with pytest.raises(InputError, match="a model that returns"):
        output_tensor((ids,))


def test_taking_examples_leaves_what_does_not_hold_them():
    x = {"tokens": torch.arange(6).view(3, 2), "mask": torch.ones(2, 2)}
    taken = take(x, 1, 2, 0)
    assert taken["tokens"].tolist() == [[2, 3]]
    assert taken["mask"] is x["mask"]
    assert example_count(x, 0) == 3
    with pytest.raises(InputError, match="batch axis"):
        example_count(torch.tensor(1.0), 0)


def test_undisturbed_puts_buffers_and_random_state_back():
    model = nn.BatchNorm1d(3)
    with _unchanged(model), undisturbed(model):
        model.running_mean.add_(1.0)
        model.num_batches_tracked.add_(1)
        torch.rand(5)
        assert not torch.backends.mha.get_fastpath_enabled()
