"""What a seed draws, and what is learned on whitened inputs."""

import pytest
import torch

from layerwise.foundations.random import stream
from layerwise.studies import feature_learning as fl
from layerwise.studies.feature_learning import runs
from layerwise.studies.feature_learning.covariance import power
from layerwise.studies.feature_learning.problem import draw_problem

SETTING = fl.Setting(dx=8, dy=4, k=2, batch=40, test_batch=40)


@pytest.mark.parametrize(("purpose", "name"), [(p, p) for p in ("problem", "train", "test")] + [("init", "start")])
def test_each_number_shows_one_stream(monkeypatch, purpose, name):
    """A seed that is ignored for one purpose is noticed in the number of that purpose."""
    monkeypatch.setattr(runs, "stream", lambda seed, *names: stream(0 if names[0] == purpose else seed, *names))
    one, other = fl.draws_of(SETTING, 1), fl.draws_of(SETTING, 2)
    assert {key for key in one if one[key] == pytest.approx(other[key], abs=1e-9)} == {name}


def test_least_squares_on_whitened_inputs_finds_the_whitened_representation():
    """F⋆G⋆Σ^½, with rows in its span, maps Σ^-½x to the labels without noise."""
    H = fl.whitened_representation(SETTING, 3)
    problem = draw_problem(SETTING, stream(3, "problem"))
    x = torch.randn(50, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) @ problem.train.root
    found = torch.linalg.lstsq(x @ power(problem.train.Sigma, -0.5), x @ problem.train.map.mT).solution.mT
    rows = torch.linalg.svd(found)[2][:2]
    assert float(fl.subspace_distance(rows, H)) < 1e-6
    assert fl.whitened_distance(SETTING, 3) == pytest.approx(float(fl.subspace_distance(H, problem.G)), abs=1e-12)
