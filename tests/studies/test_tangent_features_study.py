"""Tangent kernels of two classes: measures that can be counted by hand, and kernels against gradients by autograd."""

import math

import pytest
import torch

from error_sentences import WORDED
from layerwise import data
from layerwise.data.folder import MissingDataError
from layerwise.foundations.errors import InputError, NumericalError
from layerwise.studies.fisher_geometry import tangent_features
from layerwise.studies.fisher_geometry.tangent_features import TangentFeatures, class_means, contrast, separation

FIRST, SECOND = slice(None, 6), slice(6, None)


@pytest.fixture
def photographs(monkeypatch: pytest.MonkeyPatch):
    """Random images in place of CIFAR-10, ten of each class."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(100, 3, 32, 32, generator=generator), torch.arange(100) % 10
    monkeypatch.setattr(data, "cifar10", lambda split, limit=None: data.Images(x, y).first(limit or 100))
    tangent_features.cifar10.cache_clear()
    yield
    tangent_features.cifar10.cache_clear()


def test_entries_within_and_between_classes():
    cosines = torch.tensor([[1.0, 0.6, 0.1, 0.3], [0.6, 1.0, 0.2, 0.0], [0.1, 0.2, 1.0, 0.8], [0.3, 0.0, 0.8, 1.0]])
    second = torch.tensor([False, False, True, True])
    means = class_means(cosines, second)
    torch.testing.assert_close(means, torch.tensor([[0.6, 0.2], [0.6, 0.1], [0.15, 0.8], [0.15, 0.8]]))
    assert contrast(means, second) == pytest.approx(0.7 - 0.15)


def test_separation_of_squares():
    square = torch.tensor([[0.0, 0.0], [0.0, 2.0], [2.0, 0.0], [2.0, 2.0]])
    accuracy, fisher = separation(square, square + torch.tensor([4.0, 0.0]))
    assert accuracy == 1
    assert fisher == pytest.approx(16 / 4)  # each class has variance 1 along both axes
    accuracy, fisher = separation(square, square + torch.tensor([1.0, 0.0]))
    assert accuracy == 0.5  # the line x = 1.5 has two of each class on either side
    assert fisher == pytest.approx(1 / 4)


def test_views_are_those_of_gradients_by_autograd():
    study = TangentFeatures(pairs=("3-8",), hidden=(5,), each=6, steps=(0, 3))
    x, y, held_x, held_y = study.split(1)
    images = study.held_out("3-8", held_x, held_y)
    labels = [int(held_y[(held_x == image).flatten(1).all(1)][0]) for image in images]
    assert labels == [3] * 6 + [8] * 6
    seen = list(study.views(1))
    assert [view.step for view in seen] == [0, 3]
    for (_, loss, model), view in zip(study.trained(x, y, 1), seen, strict=True):
        rows = []
        for image in images:
            f = model(image.unsqueeze(0))[0]
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(f[8] - f[3], list(model.parameters()))]))
        rows = torch.nn.functional.normalize(torch.stack(rows).double())
        C = rows @ rows.T
        off = ~torch.eye(6, dtype=torch.bool)
        within = (C[FIRST, FIRST][off].mean() + C[SECOND, SECOND][off].mean()) / 2
        assert view.contrast == pytest.approx(float(within - C[FIRST, SECOND].mean()), abs=1e-5)
        assert view.loss == loss
        singular = torch.linalg.svdvals(rows - rows.mean(0))[:2]
        torch.testing.assert_close(view.plane.norm(dim=0), singular, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(view.plane.mean(0), torch.zeros(2).double(), rtol=0, atol=1e-5)
        assert bool((view.plane[SECOND].mean(0) >= view.plane[FIRST].mean(0)).all())


def test_a_split_holds_images_out_and_is_repeated_by_its_seed():
    study = TangentFeatures()
    split, again, other = study.split(3), study.split(3), study.split(4)
    assert (len(split.x), len(split.held_x)) == (1000, 797)
    torch.testing.assert_close(split.x.mean(0), torch.zeros(1, 8, 8), rtol=0, atol=1e-5)
    assert torch.equal(split.held_x, again.held_x)
    assert not torch.equal(split.held_y, other.held_y)


def test_a_residual_network_on_random_images(photographs):
    study = TangentFeatures(
        images="cifar10", pairs=("cat-dog",), network="resnet18", width=2, trained_on=60, each=3, steps=(0, 2), batch=8
    )
    x, _, _, held_y = study.split(0)
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-4)
    torch.testing.assert_close(x.std((0, 2, 3)), torch.ones(3))
    assert len(x) == 60
    assert sorted(held_y.tolist()) == sorted(list(range(10)) * 10)
    state = torch.get_rng_state()
    before, after = study.views(0)
    assert torch.equal(torch.get_rng_state(), state)
    assert before.contrast != after.contrast
    assert all(math.isfinite(number) for view in (before, after) for number in view[2:6])


@pytest.mark.parametrize("there", [True, False], ids=["empty", "not-set"])
def test_missing_files_are_named(there: bool, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LAYERWISE_DATA", raising=False)
    if there:
        monkeypatch.setenv("LAYERWISE_DATA", str(tmp_path))
    study = TangentFeatures(images="cifar10", network="resnet18", pairs=("cat-dog",))
    with pytest.raises(MissingDataError, match=r"LAYERWISE_DATA with cifar10/train-\S+ and cifar10/test-\S+parquet"):
        next(study.views(0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"images": "digts"},
        {"network": "resnet18"},
        {"pairs": ("3-3",)},
        {"pairs": ("cat-dog",)},
        {"pairs": ("3-8-9",)},
        {"steps": (600,)},
        {"steps": (600, 0)},
        {"each": 2},
    ],
    ids=str,
)
def test_settings_that_do_not_go_together(wrong: dict):
    with pytest.raises(InputError, match=WORDED):
        TangentFeatures(**wrong)


def test_too_few_held_out_images():
    with pytest.raises(InputError, match="held-out images"):
        next(TangentFeatures(trained_on=1700).views(0))


def test_a_training_that_diverges_says_so():
    study = TangentFeatures(hidden=(5,), lr=1e30, steps=(0, 5))
    x, y, *_ = study.split(0)
    with pytest.raises(NumericalError, match="smaller lr"):
        list(study.trained(x, y, 0))
