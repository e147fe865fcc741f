"""Fuzzed seeds whose answer was wrong for what an earlier call had left behind, or that ended in a bare error."""

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw


class Expanded(nn.Module):
    """One matrix for all examples, expanded: of a single example the products of a stack, of two no layer's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.head = nn.Parameter(torch.randn(1, 2, 2)), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.bmm(x.unsqueeze(1), self.w.expand(len(x), -1, -1)).squeeze(1).tanh())


@pytest.mark.parametrize("structure", ["dense", "lowrank", "diag"])
def test_a_layer_that_fell_back_before_is_not_taken_for_a_recorded_one(structure: str):
    """What is known of a graph holds for a table whose layers fall back as they did then."""
    model = Expanded().double()
    data = [(torch.randn(n, 2).double(), torch.zeros(n, 2).double()) for n in (1, 2)]
    rows = []
    for x, _ in data:
        for z in model(x).flatten():
            g = torch.autograd.grad(z, list(model.parameters()), retain_graph=True)
            rows.append(torch.cat([t.flatten() for t in g]))
    J = torch.stack(rows)
    expected = J.T @ J / 3
    for _ in range(3):
        F = lw.fisher(model, data, "gaussian", structure, "exact")  # type: ignore[arg-type]
        found = F.diagonal().flat() if structure == "diag" else F.to_dense()
        torch.testing.assert_close(found, expected.diag() if structure == "diag" else expected, rtol=1e-9, atol=1e-12)


class Idle(nn.Module):
    """An expert that no token is routed to, and nothing else to train."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.expert = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.sum(-1) > 1e9).nonzero().squeeze(-1)
        return self.head(x).index_add(0, chosen, self.expert(x[chosen]))


@pytest.mark.parametrize("structure", ["dense", "lowrank", "diag"])
def test_an_expert_without_tokens_has_no_curvature(structure: str):
    data = torch.randn(3, 2).double(), torch.zeros(3, 2).double()
    F = lw.fisher(Idle().double(), data, "gaussian", structure, "exact")  # type: ignore[arg-type]
    assert float(F.trace()) == 0.0


class Sometimes(nn.Module):
    """A layer that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.extra = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + self.extra(x) if len(x) > 2 else self.head(x)


def test_a_batch_that_uses_nothing_that_is_trained_adds_nothing():
    model = Sometimes().double()
    data = [(torch.randn(n, 2).double(), torch.zeros(n, 2).double()) for n in (3, 2)]
    v = torch.randn(6).double()
    alone, both = (lw.fisher(model, some, "gaussian", "implicit", "exact") @ v for some in (data[:1], data))
    torch.testing.assert_close(both, alone * 3 / 5)


class Masked(nn.Module):
    """Tokens that are kept, by example, and a mask over positions that all examples share; a tied head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.l = nn.Embedding(5, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, kept: Tensor, mask: Tensor) -> Tensor:
        h = self.l(self.stem(x) * kept.unsqueeze(-1)).cumsum(1).tanh()
        return (mask @ h) @ self.stem.weight.T


def test_inputs_that_fit_by_chance_are_not_taken_for_what_all_examples_share():
    """As many positions as examples, and tokens that differ only where they are masked: two answers fit the outputs."""
    model = Masked().double()
    kept = torch.tensor([[True, False], [True, True]])
    inputs = {"x": torch.tensor([[4, 3], [4, 1]]), "kept": kept, "mask": torch.tensor([[-0.4, 0.0], [1.2, -2.1]])}
    inputs["mask"] = inputs["mask"].double()
    rows = []
    for z in model(**inputs).flatten():
        g = torch.autograd.grad(z, list(model.parameters()), retain_graph=True)
        rows.append(torch.cat([t.flatten() for t in g]))
    torch.testing.assert_close(lw.jacobian(model, inputs).to_dense(), torch.stack(rows), rtol=1e-9, atol=1e-12)


class Target(nn.Module):
    """The loss's target from the model itself, without gradient: forward mode does not know of `no_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.l(x.cos())
        return self.head(self.l(x).tanh() - target)


@pytest.mark.parametrize("seed", range(8))
def test_in_half_precision_a_wrong_forward_mode_is_not_taken_for_rounding(seed: int):
    torch.manual_seed(seed)
    model, x = Target().to(torch.bfloat16), torch.randn(3, 2)
    v = torch.randn(12).to(torch.bfloat16)
    rows = []
    for z in model(x.to(torch.bfloat16)).flatten():
        g = torch.autograd.grad(z, list(model.parameters()), retain_graph=True)
        rows.append(torch.cat([t.flatten() for t in g]).double())
    J = torch.stack(rows)
    error = (lw.jacobian(model, x.to(torch.bfloat16)) @ v).double().flatten() - J @ v.double()
    assert float(error.norm()) < 0.02 * float(J.norm() * v.double().norm())


class Doubled(nn.Module):
    """A deep network in float32 that hands its output on in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [m for _ in range(30) for m in (nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU())]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)).double()


def test_a_float64_output_of_a_float32_network_has_products():
    model, x, y = Doubled(), torch.randn(64, 64), torch.randint(3, (64,))
    F = lw.fisher(model, (x, y), "categorical", "implicit")
    v = torch.randn(sum(p.numel() for p in model.parameters()))
    assert float(v @ (F @ v)) > 0
