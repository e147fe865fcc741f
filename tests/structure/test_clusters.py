"""Means of logit gradients, class by class."""

import pytest
import torch
from hessian_models import CLASSES, batch, in_parts, mlp, relative
from torch.func import functional_call, jacrev

from layerwise.foundations.errors import InputError
from layerwise.structure import logit_gradient_clusters


@pytest.mark.parametrize("of", ["weight", "output"])
def test_means_against_the_definition(of):
    net, (x, y) = mlp(), batch()
    y = torch.arange(12) % CLASSES
    found = logit_gradient_clusters(net, in_parts((x, y), 5), "2", of=of)
    p = net(x).detach().softmax(-1)
    eye = torch.eye(CLASSES, dtype=torch.float64)
    Q = p.sqrt().unsqueeze(-1) * (eye - p.unsqueeze(1))
    if of == "weight":
        J = jacrev(lambda W: functional_call(net, {"2.weight": W}, (x,)))(net[2].weight.detach()).flatten(2)
    else:
        z = net[:3](x).detach()
        J = torch.stack([jacrev(net[3:])(row) for row in z])
    rows = (Q @ J).detach()
    truth = torch.stack([rows[y == c].mean(0) for c in range(CLASSES)])
    assert relative(found.means, truth) <= 1e-12
    centres = truth.mean(0)
    within, between = (truth - centres).square().sum(-1).mean(), (centres - centres.mean(0)).square().sum(-1).mean()
    assert found.by_logit == pytest.approx(float(within / between))


def test_classes_without_an_example_are_left_out():
    net, (x, _) = mlp(), batch()
    assert logit_gradient_clusters(net, (x, torch.arange(12) % 2), "2").means.shape == (2, CLASSES, 25)


def test_bad_input():
    net, (x, y) = mlp(), batch()
    with pytest.raises(InputError, match="one label an example"):
        logit_gradient_clusters(net, (x.unsqueeze(1).expand(-1, 2, -1), y.unsqueeze(1).expand(-1, 2)), "2")
    with pytest.raises(InputError, match="categorical"):
        logit_gradient_clusters(net, (x, torch.randn(12, CLASSES, dtype=torch.float64)), "2", "gaussian")
