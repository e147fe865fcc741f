"""Bare parameters given to each example apart: found by trying, kept only where nothing changes."""

import pytest
import torch
from torch import Tensor, nn

from layerwise.foundations.cotangents import LossGradient
from layerwise.foundations.likelihoods import resolve
from layerwise.layers.capture.copies import spread
from layerwise.layers.capture.recorder import Batch, ModelRecorder
from layerwise.layers.table import LayerTable
from layerwise.testing import oracles

N, T, D = 4, 3, 5
SHAPES = {"position": (T, D), "scale": (D,), "token": (1, 1, D), "gain": (), "mixing": (T, T), "summed": (D,)}


class Bare(nn.Module):
    """One parameter (named as the rate of dropout layers is), used in the way given, and a head."""

    def __init__(self, use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use, self.p, self.head = use, nn.Parameter(torch.randn(SHAPES[use])), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.use == "mixing":
            h = torch.einsum("st,ntd->nsd", self.p, x)
        elif self.use == "token":
            h = torch.cat([self.p.expand(len(x), -1, -1), x], dim=1)
        elif self.use == "summed":
            h = x * self.p.square().sum()  # over the copies too, if there were any
        else:
            h = x + self.p if self.use == "position" else x * self.p
        return self.head(h.tanh().mean(1))


@pytest.mark.parametrize(
    ("use", "axes"),
    [("position", 0), ("scale", 1), ("token", -1), ("gain", 2), ("mixing", None), ("summed", None)],
)
def test_gradients_are_right_and_copies_are_found_where_they_can_be(use: str, axes: int | None):
    model = Bare(use).double()
    x, y = torch.randn(N, T, D, dtype=torch.float64), torch.randint(2, (N,))
    law = resolve("categorical")
    recorder = ModelRecorder(model, LayerTable.from_model(model))
    with recorder.session():
        recorded = recorder.record(Batch(x, y, None, 0), law)
        v = LossGradient(law).slice(recorded.terms, 0, 1, 0)
        ios = recorded.all_layers(v, last=True)
    assert recorder.findings is not None
    assert recorder.findings.copies.axes.get("p") == axes
    expected = oracles.gradients(model, x, y)[:, oracles.parameter_slices(model)["p"]]
    assert (ios["p"].rows()[0].flatten(1) - expected).abs().max() < 1e-10


def test_copies_share_the_parameters_memory_and_are_leaves():
    p = nn.Parameter(torch.randn(T, D))
    copies = spread(p, 1, N)
    assert copies.shape == (N, 1, T, D)
    assert copies.is_leaf
    assert copies.requires_grad
    assert copies.untyped_storage().data_ptr() == p.untyped_storage().data_ptr()
