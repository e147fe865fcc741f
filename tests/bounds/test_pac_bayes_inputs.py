"""What a PAC-Bayes bound may not be made of, what a checkpoint is of, and modes in which `pac_bayes` is called."""

import copy
import math
from typing import TypeVar

import jaxtyping
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import layerwise as lw
from error_sentences import THREE
from layerwise import bounds
from layerwise.bounds.pac_bayes.options import Options
from layerwise.foundations.errors import FileFormatError, InputError

M = TypeVar("M", bound=nn.Module)
SHORT = {"method": "base", "epochs": 1, "batch_size": 10, "draws": 2, "lr": 0.01}


def mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), *(between or (nn.ReLU(),)), nn.Linear(4, 2))


def moved(model: M) -> M:
    """What a training might make of it."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        for p in found.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    return found


def examples(n: int = 30):
    x = torch.randn(n, 3)
    return x, (x[:, 0] > 0).long()


@pytest.fixture
def unchecked(monkeypatch):
    """As without the tests' own check of annotations, which would refuse these before the library does."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def refused(says: str, model: object, init: object, data: object, **options: object) -> None:
    with pytest.raises(InputError, match=says):
        bounds.pac_bayes(model, init, data, **{**SHORT, **options})  # type: ignore[arg-type]


def test_tensors_by_name_must_have_all_that_a_prior_may_not_have_seen():
    init, data = mlp(nn.BatchNorm1d(4)), examples()
    model = moved(init)
    before = copy.deepcopy(init.state_dict())
    assert bounds.pac_bayes(model, before, data, **SHORT).examples == 30  # running statistics of before training
    refused("an init without '1.running_mean'", model, lw.ParamVector.of(init), data)
    model(data[0])
    refused("may not depend on the data", model, before, data)
    init = mlp()
    model = moved(init)
    model[0].requires_grad_(False)
    refused("may not depend on the data", model, init.state_dict(), data)


def test_a_prior_mean_that_is_the_trained_network_is_refused():
    model, data = mlp(), examples()
    refused("the model's own tensor", model, model, data)
    refused("the model's own tensor", model, model.state_dict(), data)
    refused("the same weights", model, copy.deepcopy(model), data)


def test_only_distinct_examples_count():
    init, data = mlp(), examples()
    model, known = moved(init), TensorDataset(*data)
    drawn = RandomSampler(known, replacement=True, num_samples=20)
    refused("repeat examples", model, init, DataLoader(known, batch_size=10, sampler=drawn))
    refused("repeat examples", model, init, DataLoader(known, batch_size=10, sampler=[*range(30), 0]))
    refused("repeat examples", model, init, [data] * 2)
    refused("repeat examples", model, init, [(data[0], data[1]) for _ in range(2)])
    refused("mask", model, init, (*data, torch.ones(30, dtype=torch.bool)))
    refused("mask", model, init, [(*data, torch.ones(30, dtype=torch.bool))])
    refused("per_draw=5 and batches", model, init, [data], per_draw=5)
    batches = DataLoader(TensorDataset(data[0].view(3, 10, 3), data[1].view(3, 10)), batch_size=None)
    assert bounds.pac_bayes(model, init, batches, **SHORT).examples == 30


@pytest.mark.parametrize(("kl", "j"), [(-5.0, 1), (math.nan, 1), (5.0, 1.5)])
def test_no_rate_of_what_is_no_divergence_or_no_prior(unchecked, kl, j):
    with pytest.raises(InputError, match=THREE):
        bounds.relative_entropy_rate(kl, j, 100)


@pytest.mark.parametrize(("draws", "delta"), [(0, 0.1), (10, 0.0)])
def test_no_limit_without_draws_or_doubt(draws, delta):
    with pytest.raises(InputError, match="Got d"):
        bounds.error_limit(0.1, draws, delta)


def test_a_checkpoint_is_of_its_data_and_its_network(tmp_path):
    init, (x, y) = mlp(), examples()
    model, path = moved(init), tmp_path / "run.safetensors"

    def run(model: nn.Module, init: nn.Module, data: object) -> float:
        return bounds.pac_bayes(model, init, data, checkpoint=path, **SHORT).bound

    found = run(model, init, (x, y))
    assert run(model, init, (x, y)) == found
    order = torch.arange(30).roll(1)
    others = [(x[order], y), (x[:, [1, 0, 2]], y), (x[order], y[order])]
    for other in others:
        with pytest.raises(FileFormatError, match="of other data"):
            run(model, init, other)
    with pytest.raises(FileFormatError, match="another model"):
        run(nn.Sequential(model[0], nn.Tanh(), model[2]), nn.Sequential(init[0], nn.Tanh(), init[2]), (x, y))
    refused("a folder", model, init, (x, y), checkpoint=tmp_path)


def test_a_shuffling_loader_goes_on_from_its_checkpoint(tmp_path):
    init, (x, y) = mlp(), examples()
    model, options = moved(init), {"checkpoint": tmp_path / "run.safetensors", **SHORT}
    loader = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)
    first = bounds.pac_bayes(model, init, loader, **options)
    assert bounds.pac_bayes(model, init, loader, **options).history == first.history
    with pytest.raises(FileFormatError, match="of other data"):
        bounds.pac_bayes(model, init, [(x, 1 - y)], **options)
    short = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True, drop_last=True)
    refused("differ from pass to pass", model, init, short, checkpoint=tmp_path / "other.safetensors")


def test_ekfac_goes_on_in_the_basis_that_it_began_with(tmp_path):
    x, y = examples()
    x[:, 2] = 0  # so that factors have null spaces, whose bases are arbitrary
    init = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    model, options = moved(init), {**SHORT, "method": "ekfac", "epochs": 2}
    whole = bounds.pac_bayes(model, init, (x, y), **options)

    class Stopped:
        def track(self, items, description, total):
            yield next(iter(items))
            raise KeyboardInterrupt

    kept = {"checkpoint": tmp_path / "run.safetensors", "checkpoint_every": 1, **options}
    with pytest.raises(KeyboardInterrupt):
        bounds.pac_bayes(model, init, (x, y), progress=Stopped(), **kept)
    resumed = bounds.pac_bayes(model, init, (x, y), **kept)
    assert whole.posterior is not None
    assert resumed.posterior is not None
    for name, rotation in whole.posterior.bases.rotations.items():
        torch.testing.assert_close(resumed.posterior.bases.rotations[name].left, rotation.left, rtol=0, atol=1e-6)


class Scaled(nn.Module):
    """With a parameter that is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 2), nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.linear(x)


@pytest.mark.parametrize("method", ["base", "iter"])
def test_a_scalar_parameter(method):
    init = Scaled()
    found = bounds.pac_bayes(moved(init), init, examples(), **{**SHORT, "method": method})
    assert found.parameters == 9
    assert found.sample(4)["scale"].shape == (4,)


def test_under_other_modes_and_wrapped():
    init, data = mlp(), examples()
    model, options = moved(init), {**SHORT, "method": "iter"}
    expected = bounds.pac_bayes(model, init, data, **options).bound
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with mode:
            made_here = tuple(t.clone() for t in data)
            assert bounds.pac_bayes(model, init, made_here, **options).bound == pytest.approx(expected)
    assert bounds.pac_bayes(nn.DataParallel(model), init, data, **options).bound == pytest.approx(expected)


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


def test_what_the_model_cannot_take_or_give():
    init, (x, y) = mlp(), examples()
    model = moved(init)
    refused("inputs of torch.float64", model, init, (x.double(), y))
    refused("not finite", model, init, (x.index_fill(0, torch.tensor([5]), math.nan), y))
    refused("torch.float16", model.half(), init.half(), (x.half(), y))
    refused("returns a tuple", moved(pair := Pair(3, 2)), pair, (x, y))


MISTAKES = {
    "epochs": 1.5,
    "draws": "3",
    "batch_size": 1.5,
    "seed": "a",
    "lr": "fast",
    "milestones": 0.5,
    "init": None,
    "model": None,
}


@pytest.mark.parametrize("name", MISTAKES)
def test_one_clear_error_for_a_wrong_type(unchecked, name):
    init = mlp()
    given = {"model": moved(init), "init": init, **SHORT, name: MISTAKES[name]}
    with pytest.raises(InputError, match=f"Got an? {name} of type|Got {name}="):
        bounds.pac_bayes(data=examples(), **given)
    with pytest.raises(InputError, match="an init of type Tensor"):
        bounds.pac_bayes(moved(init), torch.zeros(26), examples(), **SHORT)  # type: ignore[arg-type]


def test_an_interval_that_grows_without_end():
    common = {"delta": 0.1, "delta_draws": 0.1, "cap": 0.1, "precision": 100, "batch_size": 1, "lr": 1.0}
    options = Options(method="iter-d", epochs=10, interval=2, decay=1e-320, milestones=(0.5,), **common)
    assert [options.due(epoch, 0) for epoch in (1, 2, 9)] == [False, True, False]


def test_a_cap_that_binds_is_said():
    init = mlp()
    model, data = moved(init), examples()
    assert "the cap binds" in repr(bounds.pac_bayes(model, init, data, cap=1e-6, **SHORT))
    assert "the cap binds" not in repr(bounds.pac_bayes(model, init, data, cap=1e3, **SHORT))
