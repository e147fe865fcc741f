"""Rules that run an equivalent forward run it for the class they were written for, not for a forward of the user."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.layers.table import LayerTable


class SquaredBag(nn.EmbeddingBag):
    """Not linear in its table."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(*args, **kwargs) ** 2


class BoundedPair(nn.Bilinear):
    """Bounded."""

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        return 3 * torch.tanh(super().forward(input1, input2))


class BoundedAttention(nn.MultiheadAttention):
    """Bounded."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(*args, **kwargs)
        return 3 * torch.tanh(out), weights


class Net(nn.Module):
    """One such layer, and a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = {
            "bag": lambda: SquaredBag(7, 4, mode="sum"),
            "pair": lambda: BoundedPair(4, 4, 4),
            "attention": lambda: BoundedAttention(4, 2, batch_first=True),
            "instance": lambda: nn.EmbeddingBag(7, 4, mode="sum"),
        }
        self.kind, self.layer, self.head = kind, layers[kind](), nn.Linear(4, 3)
        if kind == "instance":
            plain = self.layer.forward
            self.layer.forward = lambda x: 3 * plain(x) ** 2  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "pair":
            return self.head(self.layer(x, x))
        if self.kind == "attention":
            return self.head(self.layer(x, x, x)[0].mean(1))
        return self.head(self.layer(x))

    def inputs(self, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.kind in ("bag", "instance"):
            return torch.randint(7, (5, 3), generator=generator)
        shape = (5, 4) if self.kind == "pair" else (5, 3, 4)
        return torch.randn(shape, generator=generator).double()


KINDS = ("bag", "pair", "attention", "instance")


@pytest.mark.parametrize("kind", KINDS)
def test_curvature_and_kernel_are_those_of_the_users_forward(kind: str):
    model = Net(kind).double()
    x, y = model.inputs(), torch.tensor([0, 1, 2, 0, 1])
    f, parameters = model(x), list(model.parameters())
    rows = [torch.autograd.grad(z, parameters, retain_graph=True) for z in f.flatten()]
    J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    p = f.softmax(-1).detach()
    J_of = J.view(5, 3, -1)
    H = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    expected = torch.einsum("nci,ncd,ndj->ij", J_of, H, J_of) / 5
    F = lw.fisher(model, (x, y), structure="dense", estimator="exact")
    torch.testing.assert_close(F.to_dense(), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(lw.ntk(model, x).matrix(), J @ J.T, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(model(x), f)


@pytest.mark.parametrize("member", [lw.optim.KFAC, lw.optim.EKFAC, lw.optim.SOAP])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.* get the fallback's update")
def test_training_runs_the_users_forward(kind: str, member: type[lw.optim.Layerwise]):
    model, other = Net(kind).double(), Net(kind).double()
    opt = member(model, lr=1e-2)
    for step in range(4):
        x = model.inputs(step)
        other.load_state_dict(model.state_dict())
        opt.zero_grad()
        f = model(x)
        assert torch.equal(f, other(x))
        nn.functional.cross_entropy(f, torch.tensor([0, 1, 2, 0, 1])).backward()
        opt.step()
    assert kind != "instance" or "forward" in vars(model.layer)


def test_the_table_says_why():
    table = LayerTable.from_model(Net("pair"))
    assert "a forward of its own" in str(table.layers[0].reason)


def test_a_forward_that_is_the_rules_for_a_while_is_no_users():
    """Curvature between an optimizer's forward and its backward has the same layers as before."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x)[0].mean(1))

    model = Plain()
    x, y = torch.randn(5, 3, 4), torch.tensor([0, 1, 2, 0, 1])
    before = [spec.reason for spec in LayerTable.from_model(model).layers]
    opt = lw.optim.KFAC(model)
    loss = nn.functional.cross_entropy(model(x), y)
    assert [spec.reason for spec in LayerTable.from_model(model).layers] == before
    lw.fisher(model, (x, y), structure="kfac")
    loss.backward()
    opt.step()
