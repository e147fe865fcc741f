"""Where most matrices of a model do not get the member's own update, the first step says so; where it is meant, not."""

import re
import warnings

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw

pytestmark = pytest.mark.usefixtures("untyped")


class Recurrent(nn.Module):
    """An LSTM between a table and a head: nine tenths of its matrices have no layer rule."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 4)  # the largest of all, and no matrix to any member
        self.lstm = nn.LSTM(4, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(x))[0][:, -1])


def warned(model: nn.Module, opt: torch.optim.Optimizer, steps: int = 3) -> list[str]:
    x, y = torch.arange(20).reshape(5, 4), torch.arange(5) % 3
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(steps):
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
    return [str(w.message) for w in found if "fallback" in str(w.message)]


@pytest.mark.parametrize("member", [lw.optim.KFAC, lw.optim.EKFAC, lw.optim.FOOF])
def test_the_warning_names_share_reason_and_remedy_once(member: type[lw.optim.Layerwise]) -> None:
    model = Recurrent()
    (said,) = warned(model, member(model))
    assert said.startswith("94 % of the model's matrix parameters")  # 384 of the LSTM, 24 of the head
    assert f"not that of {member.__name__}" in said
    assert "94 % LSTM has no layer rule (lstm.weight_ih_l0)" in said
    for remedy in ("print(opt)", "matrices=", "Muon", "overrides="):
        assert remedy in said


@pytest.mark.parametrize("member", [lw.optim.Muon, lw.optim.Shampoo, lw.optim.SOAP, lw.optim.Adam])
def test_members_that_treat_every_matrix_say_nothing(member: type[lw.optim.Layerwise]) -> None:
    model = Recurrent()
    assert warned(model, member(model)) == []


def test_nothing_is_said_of_what_the_user_chose() -> None:
    model = Recurrent()
    assert warned(model, lw.optim.KFAC(model, overrides={"lstm*": {"update": "fallback"}})) == []


def test_nothing_is_said_of_less_than_half() -> None:
    model = nn.Sequential(Recurrent(2), nn.Linear(3, 40), nn.Linear(40, 3))
    assert warned(model, lw.optim.KFAC(model)) == []


def test_several_reasons_come_with_their_shares() -> None:
    model = Recurrent()
    opt = lw.optim.EKFAC(model, max_factor=6)
    (said,) = warned(model, opt)
    assert re.search(r"100 % .*Why: 94 % LSTM .*; 6 % a factor would be larger than max_factor=6 \(head.weight\)", said)
