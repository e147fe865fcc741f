"""Which parameters are matrices, for members of gradients alone and by the user's word."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw


class Odd(nn.Module):
    """Weights that no layer type with a rule has: experts, a recurrent layer, a bare matrix, a tied table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.experts = nn.Parameter(torch.randn(3, 4, 4))
        self.mix = nn.Parameter(torch.randn(4, 4))
        self.start = nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.lstm(self.table(x) + self.start)[0] @ self.mix
        h = torch.einsum("ntd,edk->ntk", h, self.experts)
        return h @ self.table.weight.T


def _own(opt: lw.optim.Layerwise) -> set[str]:
    lines = str(opt).splitlines()
    return {line.split()[0] for line in lines if line.startswith(("lstm", "experts", "mix", "start", "table"))} - {
        line.split()[0] for line in lines if "fallback" in line
    }


@pytest.mark.parametrize("member", [lw.optim.Muon, lw.optim.Shampoo, lw.optim.SOAP])
def test_members_of_gradients_treat_every_matrix(member: type[lw.optim.Layerwise]) -> None:
    model = Odd()
    opt = member(model, lr=1e-3)
    assert _own(opt) == {"lstm.weight_ih_l0", "lstm.weight_hh_l0", "experts", "mix"}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):  # SOAP's first step only looks
        model(torch.randint(7, (5, 3))).square().mean().backward()
        opt.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_an_orthogonal_update_of_each_matrix_in_a_split_weight() -> None:
    torch.manual_seed(0)
    whole, parts = nn.Linear(4, 12, bias=False), nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
    for part, w in zip(parts, whole.weight.detach().chunk(3), strict=True):
        part.weight.data = w.clone()
    x = torch.randn(6, 4)
    one = lw.optim.Muon(whole, lr=0.1, matrices={"*": lw.split(3)})
    three = lw.optim.Muon(parts, lr=0.1)
    whole(x).square().sum().backward()
    torch.cat([part(x) for part in parts], -1).square().sum().backward()
    one.step()
    three.step()
    torch.testing.assert_close(whole.weight, torch.cat([part.weight for part in parts]))


@pytest.mark.parametrize("separate_bias", [True, False])
def test_kfac_of_a_split_weight_is_that_of_three_layers(separate_bias: bool) -> None:
    torch.manual_seed(0)
    whole, parts = nn.Linear(4, 12), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    for k, part in enumerate(parts):
        part.weight.data, part.bias.data = (t.detach().chunk(3)[k].clone() for t in (whole.weight, whole.bias))

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([part(x) for part in self.parts], -1)

    x = torch.randn(6, 4)
    models = whole, Apart()
    options: dict[str, Any] = {"lr": 0.1, "estimator": "empirical", "separate_bias": separate_bias}
    optimizers = lw.optim.KFAC(whole, matrices={"*": lw.split(3)}, **options), lw.optim.KFAC(models[1], **options)
    for _ in range(2):
        for model, opt in zip(models, optimizers, strict=True):
            opt.zero_grad()
            model(x).square().sum().backward()
            opt.step()
    torch.testing.assert_close(whole.weight, torch.cat([part.weight for part in parts]))


def test_a_bias_apart_is_no_matrix_to_be_cut() -> None:
    """Under the default, biases stand apart; the pattern names their layer."""
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 4))
    for name in ("KFAC", "Muon"):
        opt = getattr(lw.optim, name)(model, lr=1e-3, matrices={"0*": lw.split(3)})
        opt.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.arange(8) % 4).backward()
        opt.step()
        assert "3 × 4 × " in repr(opt)


@pytest.mark.parametrize("member", [lw.optim.Muon, lw.optim.Shampoo, lw.optim.SOAP])
def test_depthwise_kernels_are_one_matrix_as_they_are_for_bare_parameters(
    member: type[lw.optim.Layerwise],
) -> None:
    """One kernel is a vector, for which an orthogonal update or two factors mean nothing."""
    torch.manual_seed(0)
    models = [nn.Conv2d(6, 6, 3, groups=6) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [member(models[0], lr=1e-2), member(models[1].parameters(), lr=1e-2)]
    assert "fallback" not in str(optimizers[0]).splitlines()[2]
    for step in range(3):
        x = torch.randn(4, 6, 5, 5, generator=torch.Generator().manual_seed(step))
        for model, opt in zip(models, optimizers, strict=True):
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
    torch.testing.assert_close(models[0].weight, models[1].weight)


def test_the_user_may_say_that_depthwise_kernels_are_matrices_apart() -> None:
    apart = lw.optim.Muon(nn.Conv2d(6, 6, 3, groups=6), matrices={"*": lw.batched()})
    assert "6 × 1 × 9" in str(apart)
