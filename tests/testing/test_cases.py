"""Every case can be built, again and again, and is what its tags say."""

import doctest

import pytest
import torch
from torch import Tensor, nn

from layerwise.foundations.errors import NameLookupError
from layerwise.testing import cases
from layerwise.testing.cases import CASES, Case, case, select


def _name(c: Case) -> str:
    return c.name


def _forward(model: nn.Module, x) -> Tensor:
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def _tensors(model: nn.Module, x, y: Tensor) -> list[Tensor]:
    inputs = list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, tuple) else [x]
    return [*model.state_dict().values(), *inputs, y]


def _first(x, n: int):
    if isinstance(x, dict):
        return {name: value[:n] for name, value in x.items()}
    return tuple(value[:n] for value in x) if isinstance(x, tuple) else x[:n]


@pytest.mark.parametrize("c", CASES, ids=_name)
def test_a_seed_determines_the_case(c: Case):
    state = torch.get_rng_state()
    first, again, other = (_tensors(*c.make(seed)) for seed in (3, 3, 4))
    assert all(torch.equal(t, u) for t, u in zip(first, again, strict=True))
    assert not all(torch.equal(t, u) for t, u in zip(first, other, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("c", CASES, ids=_name)
def test_a_case_is_small_in_float64_and_in_eval_mode(c: Case):
    model, x, y = c.make()
    f = _forward(model, x)
    assert f.dtype == torch.float64
    assert f.isfinite().all()
    assert all(t.dtype == torch.float64 for t in _tensors(model, x, y) if t.is_floating_point())
    assert not model.training
    assert 10 < sum(p.numel() for p in model.parameters()) <= 300
    assert 3 <= len(f) // c.rows <= 5
    assert c.options.get("examples", len(f)) * c.rows == len(f)


@pytest.mark.parametrize("c", CASES, ids=_name)
def test_labels_fit_the_output(c: Case):
    model, x, y = c.make()
    f = _forward(model, x)
    if c.likelihood != "categorical":
        assert y.shape == f.shape
    else:
        logits = f.movedim(c.options.get("class_axis", -1), -1)
        assert y.shape == logits.shape[:-1]
        counted = y != c.options.get("ignore_index")
        assert y[counted].min() >= 0
        assert y[counted].max() < logits.shape[-1]
    loss = c.loss(f, y)
    assert loss.shape == ()
    assert loss.isfinite()


@pytest.mark.parametrize("c", CASES, ids=_name)
def test_examples_do_not_interact(c: Case):
    model, x, _ = c.make()
    two = _forward(model, _first(x, 2))
    torch.testing.assert_close(two, _forward(model, x)[: 2 * c.rows], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("c", CASES, ids=_name)
def test_tags_tell_the_truth(c: Case):
    model, _, _ = c.make()
    modules = [m for m in model.modules() if not isinstance(m, nn.modules.linear.NonDynamicallyQuantizableLinear)]
    kinds = {
        "linear": nn.Linear,
        "conv": (nn.Conv1d, nn.Conv2d, nn.Conv3d),
        "conv_transpose": nn.modules.conv._ConvTransposeNd,
        "norm": (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase),
        "embedding": nn.Embedding,
        "attention": nn.MultiheadAttention,
        "recurrent": nn.RNNBase,
    }
    has = {tag for tag, kind in kinds.items() if any(isinstance(m, kind) for m in modules)}
    assert has == c.tags & kinds.keys()
    owned = sum(len(list(m.parameters(recurse=False))) for m in model.modules())
    assert ("tied" in c.tags) == (owned > len(list(model.parameters())))
    assert ("frozen" in c.tags) == any(not p.requires_grad for p in model.parameters())
    assert ("weights" in c.tags) == ("weight" in c.options)
    assert ("smoothing" in c.tags) == ("label_smoothing" in c.options)
    assert ("mask" in c.tags) == bool({"mask", "ignore_index"} & c.options.keys())
    assert c.likelihood in c.tags


@pytest.mark.parametrize("c", CASES, ids=_name)
def test_parameters_without_a_gradient_are_the_unused_ones(c: Case):
    model, x, y = c.make()
    c.loss(_forward(model, x), y).backward()
    untouched = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert ("unused" in c.tags) == bool(untouched)


def test_names_are_unique_and_found():
    assert len({c.name for c in CASES}) == len(CASES)
    assert case("mlp").name == "mlp"
    with pytest.raises(NameLookupError, match="Did you mean 'conv2d'"):
        case("convd2d")


def test_selection_is_by_all_tags_and_without_others():
    assert [c.name for c in select("attention", "generic")] == ["attention_bias_kv"]
    assert all("sequence" not in c.tags for c in select("conv", without=["sequence"]))
    assert select() == CASES
    with pytest.raises(NameLookupError, match="Did you mean 'linear'"):
        select("linaer")


def test_the_module_docstring_runs():
    assert doctest.testmod(cases).failed == 0
