"""Embedding bags and bilinear layers: linear maps of indices and of products, recorded inside an equivalent forward."""

from typing import Any

import pytest
import torch
from torch import nn

import layerwise as lw
from layerwise.foundations.errors import InputError
from layerwise.layers.rules.bilinear import MOST_PRODUCTS, BilinearRule
from layerwise.layers.rules.embedding_bag import EmbeddingBagRule
from layerwise.layers.table import LayerTable
from layerwise.testing import check_layer_rule

TOKENS = torch.tensor([[1, 2, 0, 0], [3, 3, 4, 0], [5, 1, 2, 6]])
WEIGHTS = torch.tensor([[1.0, 2.0, 3.0, -1.0], [0.5, 1.0, 0.0, 2.0], [1.0, 1.0, 2.0, 0.3]])


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bag_contract(mode: str, padding: int | None):
    check_layer_rule(nn.EmbeddingBag(7, 3, mode=mode, padding_idx=padding), TOKENS, tol=1e-10)


def test_bag_contract_with_weights():
    x = {"input": TOKENS, "per_sample_weights": WEIGHTS}
    check_layer_rule(nn.EmbeddingBag(7, 3, mode="sum"), x, tol=1e-10)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_that_begin_at_offsets(mode: str, last: bool):
    """The equivalent forward is the module's, an empty bag and a padding token included."""
    bag = nn.EmbeddingBag(7, 3, mode=mode, padding_idx=0, include_last_offset=last).double()
    tokens, offsets = TOKENS.flatten(), torch.tensor([0, 3, 3, 7, *([12] if last else [])])
    torch.testing.assert_close(EmbeddingBagRule().forward(bag, lambda *_: None, tokens, offsets), bag(tokens, offsets))


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"mode": "max"}, "mode='max'"), ({"max_norm": 1.0}, "max_norm"), ({"sparse": True, "mode": "sum"}, "sparse")],
)
def test_bags_that_are_no_linear_map_fall_back_with_the_reason(options: dict[str, Any], reason: str):
    table = LayerTable.from_model(nn.Sequential(nn.EmbeddingBag(7, 3, **options)))
    assert not table.layers[0].sites
    assert reason in str(table.layers[0].reason)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(4,), (4, 3)])
def test_bilinear_contract(bias: bool, lead: tuple[int, ...]):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(*lead, 3, generator=generator), torch.randn(*lead, 2, generator=generator))
    check_layer_rule(nn.Bilinear(3, 2, 4, bias=bias), x, tol=1e-10)


def test_a_bilinear_layer_of_too_many_products_falls_back():
    table = LayerTable.from_model(nn.Sequential(nn.Bilinear(MOST_PRODUCTS // 2 + 1, 2, 2)))
    assert not table.layers[0].sites
    assert "products of entries" in str(table.layers[0].reason)


def test_a_bilinear_layer_keeps_its_precision_under_autocast():
    layer = nn.Bilinear(3, 2, 4)
    x1, x2 = torch.randn(5, 3), torch.randn(5, 2)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = BilinearRule().forward(layer, lambda *_: None, x1, x2), layer(x1, x2)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_long_bags_in_half_precision(dtype: torch.dtype):
    """More tokens than bfloat16 can count."""
    bag = nn.EmbeddingBag(7, 3).to(dtype)
    tokens, offsets = torch.arange(3000) % 7, torch.tensor([0, 1000])
    found = EmbeddingBagRule().forward(bag, lambda *_: None, tokens, offsets)
    exact = bag.double()(tokens, offsets)
    assert (found.double() - exact).abs().max() < 4 * torch.finfo(dtype).eps


def test_offsets_that_do_not_begin_at_zero_are_an_error():
    bag = nn.EmbeddingBag(7, 3)
    with pytest.raises(InputError, match="offsets begin at 2"):
        EmbeddingBagRule().forward(bag, lambda *_: None, torch.arange(6), torch.tensor([2, 4]))


class Pairs(nn.Module):
    """A bag of tokens and itself, multiplied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.pair, self.head = nn.EmbeddingBag(7, 3, mode="sum"), nn.Bilinear(3, 3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.bag(x)
        return self.head(torch.tanh(self.pair(h, h)))


def test_curvature_is_exact_and_every_layer_is_seen():
    model = Pairs().double()
    f = model(TOKENS)
    rows = [torch.autograd.grad(z, list(model.parameters()), retain_graph=True) for z in f.flatten()]
    J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    F = lw.fisher(model, (TOKENS, torch.zeros(3, 2).double()), "gaussian", "dense", "exact")
    torch.testing.assert_close(F.to_dense(), J.T @ J / 3, rtol=1e-10, atol=1e-12)
    K = lw.fisher(model, (TOKENS, torch.zeros(3, 2).double()), "gaussian", "kfac", "exact")
    assert all(spec.sites for spec in K.table.layers)  # type: ignore[attr-defined]


@pytest.mark.parametrize("member", [lw.optim.KFAC, lw.optim.EKFAC, lw.optim.FOOF, lw.optim.Muon, lw.optim.SOAP])
def test_members_treat_the_bilinear_layer_and_give_bags_the_update_of_embeddings(member: type[lw.optim.Layerwise]):
    model = Pairs()
    opt = member(model, lr=1e-2)
    losses = []
    for _ in range(30):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(TOKENS), torch.tensor([0, 1, 1]))
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    said = {line.split()[0]: line for line in str(opt).splitlines()}
    assert "fallback: an embedding" in said["bag"]
    assert "fallback" not in said["pair"]
