"""Layers whose calls cannot be seen: the optimizer says so, once, and what to do."""

import warnings

import pytest
import torch
from optim_tools import batches, cross_entropy, flat, mlp, train_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import layerwise as lw
from layerwise.foundations.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("untyped")
DATA = batches(6, 5)


class Checkpointed(nn.Module):
    """Blocks that are checkpointed in training alone, as many models have it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.head, self.reentrant = nn.Linear(5, 6), nn.Linear(6, 3), reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=self.reentrant) if self.training else block(h)  # type: ignore[assignment]
        return self.head(h)


def checkpointed(reentrant: bool) -> Checkpointed:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Checkpointed(reentrant).double()


@pytest.mark.parametrize("member", [lw.optim.KFAC, lw.optim.EKFAC, lw.optim.FOOF])
def test_reentrant_checkpoints_are_said_once(member):
    model = checkpointed(reentrant=True)
    opt = member(model, lr=1e-3, estimator="empirical")
    with pytest.warns(UserWarning, match=r"3 of 5 layers have a gradient but no statistics.*use_reentrant=False"):
        train_step(model, opt, DATA[0], cross_entropy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in DATA[1:4]:
            train_step(model, opt, batch, cross_entropy)
    assert torch.isfinite(flat(model)).all()


def test_what_it_says_to_do_helps():
    """With ``use_reentrant=False`` every layer has statistics of every step."""
    model = checkpointed(reentrant=False)
    opt = lw.optim.KFAC(model, lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in DATA[:3]:
            train_step(model, opt, batch, cross_entropy)
    layers = [t for of_param in opt.state_dict()["state"].values() for t in of_param.values()]
    counts = [t["P_count"] for t in layers if "P_count" in t]
    assert [int(count[0]) for count in counts] == [3] * 5


def test_labels_cannot_be_drawn_through_reentrant_checkpoints():
    model = checkpointed(reentrant=True)
    opt = lw.optim.KFAC(model, likelihood="categorical")
    with pytest.raises(UnsupportedError, match="Pass use_reentrant=False"):
        train_step(model, opt, DATA[0], cross_entropy)


def test_labels_that_nobody_asked_for_are_left_out_there():
    """The likelihood is recognised, and labels cannot be drawn: a warning, and the loss's own statistics."""
    model = checkpointed(reentrant=True)
    opt = lw.optim.KFAC(model, lr=1e-3)
    with pytest.warns(UserWarning, match="no statistics"):
        train_step(model, opt, DATA[0], cross_entropy)
    with pytest.warns(UserWarning, match=r"the empirical Fisher matrix\): labels cannot be drawn.*use_reentrant=True"):
        train_step(model, opt, DATA[1], cross_entropy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in DATA[1:4]:
            train_step(model, opt, batch, cross_entropy)
    assert "likelihood=auto (empirical)" in repr(opt)
    assert torch.isfinite(flat(model)).all()


def test_a_part_that_is_called_on_its_own():
    """Its parameters get a gradient that no forward of the model explains."""

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = mlp(5, 4), mlp(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    model = Apart()
    opt = lw.optim.KFAC(model, lr=1e-3, estimator="empirical")
    opt.zero_grad()
    cross_entropy(model.head(model(DATA[0][0]).tanh()), DATA[0][1]).backward()
    with pytest.warns(
        UserWarning, match=r"1 of 2 layers have a gradient but no statistics.*head\.0.*call the model itself"
    ):
        opt.step()


def test_no_word_about_layers_that_rest():
    """Without a gradient there is no step, and between statistics there are none to have."""
    model = mlp()
    opt = lw.optim.KFAC(model, lr=1e-3, factor_every=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in DATA:
            train_step(model, opt, batch, cross_entropy)
