"""What autograd or torch's batching rules hide of a layer, and the checks that see it."""

import torch
from torch import nn

import layerwise as lw


def test_an_operation_in_place_on_a_view_does_not_hide_the_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)).double()
    x, y = torch.randn(6, 7, 4, dtype=torch.float64), torch.randint(3, (6, 7))
    F = lw.fisher(model, (x, y), "categorical", "kfac", "exact")
    assert all(spec.sites for spec in F.table.layers)


def test_gradients_of_prelu_are_each_examples_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.PReLU(2), nn.Linear(2, 2)).double()
    x = torch.randn(4, 2, dtype=torch.float64)
    f = model(x).flatten()
    rows = [torch.autograd.grad(entry, list(model.parameters()), retain_graph=True) for entry in f]
    truth = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    torch.testing.assert_close(lw.jacobian(model, x).to_dense(), truth)
