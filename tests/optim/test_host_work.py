"""What the host does in a step: as much for wide layers as for narrow ones."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import layerwise as lw
from layerwise.optim.engine import Layerwise

pytestmark = pytest.mark.usefixtures("untyped")

PACKAGE = lw.__name__


def lines_of(call: Callable[[], Any]) -> int:
    """How many lines of the library are run, those of loops and comprehensions as often as they are."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace if frame.f_globals.get("__name__", "").startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def lines_of_a_step(member: str, width: int) -> int:
    """Of the sixth, when nothing is new any more; weights of the norm layer are matrices of one entry."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 3))
    opt = getattr(lw.optim, member)(model, lr=1e-3)
    x, y = torch.randn(16, 4), torch.randint(3, (16,))
    for step in range(6):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if step == 5:
            return lines_of(opt.step)
        opt.step()
    raise AssertionError


@pytest.mark.parametrize("may_sync", [True, False])
@pytest.mark.parametrize("member", ["Muon", "SOAP", "KFAC"])
def test_work_on_the_host_does_not_grow_with_a_norm_layer(member: str, may_sync: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: may_sync))
    narrow, wide = (lines_of_a_step(member, width) for width in (16, 128))
    assert narrow > 100
    assert wide - narrow < 16  # of 112 entries more
