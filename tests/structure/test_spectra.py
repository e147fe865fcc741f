"""Outliers, and inputs along their mean."""

import pytest
import torch
from hessian_models import batch, convolutional, images, in_parts, mlp
from torch.nn import functional as F

from layerwise.foundations.errors import InputError
from layerwise.structure import mean_alignment, outliers, output_hessian


def test_outliers_of_given_eigenvalues():
    values = torch.tensor([1.0, 10.0, 0.1, 8.0])
    found = outliers(values, classes=3)
    assert (found.ratio, found.count) == (8.0, 3)
    assert found.trace_fraction == pytest.approx(18 / 19.1)
    assert outliers(values, classes=3, trace=36.0).trace_fraction == pytest.approx(0.5)
    assert outliers(values, 3, threshold=0.001).count == 4


def test_the_last_layer_has_no_eigenvalue_after_its_outliers():
    values = torch.linalg.eigvalsh(output_hessian(mlp(), batch(), "4"))
    found = outliers(values, classes=4)
    assert found.ratio == float("inf")
    assert found.trace_fraction == pytest.approx(1)


def test_the_bound_holds_whatever_the_inputs():
    """γ_1/γ_2 ≥ ‖E x‖²/‖Cov x‖, without the one that the thesis takes away."""
    for shift in (0.0, 0.3, 3.0):
        for scale in (0.1, 1.0):
            x = shift + scale * torch.randn(9, 6, dtype=torch.float64) * torch.rand(6, dtype=torch.float64)
            found = mean_alignment(mlp(), (x, torch.zeros(9).long()), "0")
            assert found.ratio >= found.bound * (1 - 1e-9)
            mean, covariance = x.mean(0), torch.cov(x.mT, correction=0)
            assert found.bound == pytest.approx(float(mean @ mean / torch.linalg.matrix_norm(covariance, 2)))
            gamma, V = torch.linalg.eigh(x.mT @ x / 9)
            assert found.alignment == pytest.approx(float(V[:, -1] @ mean) ** 2 / float(mean @ mean))
            assert found.ratio == pytest.approx(float(gamma[-1] / gamma[-2]))


def test_inputs_that_do_not_vary():
    x = torch.ones(5, 6, dtype=torch.float64)
    found = mean_alignment(mlp(), (x, torch.zeros(5).long()), "0")
    assert found.alignment == pytest.approx(1)
    assert found.ratio > 1e12


def test_the_mean_direction_of_a_convolution():
    """The first left singular vector of E[X] [n, P]."""
    net, (x, y) = convolutional(), images()
    found = mean_alignment(net, in_parts((x, y), 2), "0")
    patches = F.unfold(x, 3, padding=1)
    S = torch.einsum("nip,njp->ij", patches, patches)
    direction = torch.linalg.svd(patches.mean(0)).U[:, 0]
    assert found.alignment == pytest.approx(float(torch.linalg.eigh(S)[1][:, -1] @ direction) ** 2)
    assert len(mean_alignment(net, (x, y), "3")) == 2


def test_bad_input():
    for classes in (1, 5):
        with pytest.raises(InputError, match="classes"):
            outliers(torch.ones(4), classes)
    with pytest.raises(InputError, match="finite"):
        outliers(torch.tensor([1.0, float("nan")]), 2)


def test_positions_that_do_not_count_have_no_part_in_the_mean():
    net = torch.nn.Sequential(torch.nn.Linear(4, 5))
    x = torch.randn(10, 6, 4) + torch.tensor([3.0, 0, 0, 0])
    y = torch.randint(5, (10, 6))
    x[:, 3:], y[:, 3:] = torch.tensor([0, 50.0, 0, 0]), -100
    masked, alone = mean_alignment(net, (x, y), "0"), mean_alignment(net, (x[:, :3], y[:, :3]), "0")
    assert masked.alignment > 0.95
    assert abs(masked.alignment - alone.alignment) < 0.05  # the first takes the mean over positions
