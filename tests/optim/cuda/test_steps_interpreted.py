"""Whole steps through the kernels, in Triton's interpreter, against torch: a minute, by `make test-interpreted`."""

from typing import Any

import pytest
import torch
from test_padding import MEMBERS as PADDED
from test_padding import made as made_words
from test_padding import train as train_words
from test_pieces import drop, flat, train, zoo
from torch import nn

import layerwise as lw
from interpreter import only_interpreted
from layerwise.optim.cuda import backend, elementwise, factor, pieces, scalings, storage
from layerwise.optim.cuda.linalg import packed, packed_fp16
from layerwise.optim.cuda.triton import elementwise as launches
from layerwise.optim.cuda.triton import packed as packed_launches
from layerwise.optim.engine import Layerwise
from layerwise.optim.members.ekfac import CorrectedEigenvalues

pytestmark = [pytest.mark.usefixtures("untyped"), pytest.mark.interpreted, only_interpreted]


def ekfac_in_half_precision(model: nn.Module, averages: bool = False, **options: Any) -> Layerwise:
    """Gradients may be gathered in half precision; not, where they are added to AdamW's average before."""
    rule = CorrectedEigenvalues(scaling="running", scaling_decay=0.9, averages=averages)
    how = {"solver": "products", "precision": "half", "scale": "adam", "momentum": 0.9, "refresh_every": 1}
    return Layerwise(model, rule=rule, lr=0.01, **how, **options)


MEMBERS: dict[str, Any] = {
    "products": lambda m: lw.optim.KFAC(
        m, lr=0.01, refresh_every=1, solver="products", clip=1e-5, momentum=0.9, nesterov=True, scale="formula"
    ),
    "half": lambda m: lw.optim.KFAC(
        m, lr=0.01, refresh_every=1, solver="products", precision="half", weight_decay=0.1, scale="formula"
    ),
    # scalings in float32: the interpreter cuts bfloat16 off, where torch rounds
    "EKFAC": lambda m: lw.optim.EKFAC(
        m, lr=0.01, refresh_every=1, solver="products", scaling="running", scaling_decay=0.9, scale="formula"
    ),
    "EKFAC in half precision": lambda m: ekfac_in_half_precision(m, averages=True),
    "EKFAC in half precision, of AdamW's average": lambda m: ekfac_in_half_precision(m, nesterov=True),
    "Adam": lambda m: lw.optim.Adam(m, lr=0.01, weight_decay=0.1),
    "SGD": lambda m: lw.optim.SGD(m, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
}


@pytest.mark.parametrize("edit", [None, drop], ids=["all", "some"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
@pytest.mark.parametrize("name", MEMBERS)
def test_kernels_take_the_same_steps(name: str, dtype: torch.dtype, edit: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    monkeypatch.setattr(scalings, "available", lambda device: True)
    found = []
    for kernels in (False, True):
        if kernels:
            for module in (elementwise, pieces, storage):
                monkeypatch.setattr(module, "available", lambda device: True)
            monkeypatch.setattr(launches, "TILE", {"ROWS": 16, "COLUMNS": 32, "num_warps": 1})
        model = zoo()
        if dtype != torch.float32:
            if name not in ("Adam", "SGD"):
                pytest.skip("rules with factors are compared in float32 alone")
            model = model.half()
        start = flat(model).float()
        opt = MEMBERS[name](model)
        if dtype == torch.float32:
            train(opt, model, range(3), edit)
        else:
            for step in range(3):
                g = torch.Generator().manual_seed(step)
                x, y = torch.randint(9, (8, 4), generator=g), torch.randn(8, 4, 3, generator=g)
                opt.zero_grad()
                (model(x).float() - y).square().mean().backward()
                if edit:
                    edit(model, step)
                opt.step()
        found.append(flat(model).float())
    way = float((found[0] - start).norm())
    limit = 0.1 if dtype != torch.float32 else 5e-2 if "half precision" in name else 2e-3  # gradients, too, are rounded
    assert float((found[1] - found[0]).norm()) < limit * way


@pytest.mark.parametrize("name", ["KFAC", "EKFAC running", "Shampoo", "SOAP"])
def test_packed_factors_take_the_same_steps(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    monkeypatch.setattr(backend, "PAD_TO", {"cpu": 16})
    monkeypatch.setattr(packed_launches, "BLOCK", 16)
    monkeypatch.setattr(packed_launches, "MIRROR_BLOCK", 16)
    ends = []
    for kernels in (False, True):
        monkeypatch.setattr(factor, "packs", lambda shape, size, on=kernels: on)
        for module in (packed, packed_fp16):
            monkeypatch.setattr(module, "available", lambda device, on=kernels: on)
        model = made_words("words")
        train_words("words", PADDED[name](model), model, 0, 3)
        ends.append(flat(model))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)
