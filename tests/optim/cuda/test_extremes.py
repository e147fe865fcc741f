"""Layers that are dead, switched on late or hit by one enormous gradient: nothing becomes NaN, as on a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.cuda.storage import StoredMatrix
from layerwise.optim.engine import Layerwise
from layerwise.optim.factored_damping import factored_damping
from layerwise.optim.step import spectral_cap

pytestmark = pytest.mark.usefixtures("untyped")


@pytest.fixture(autouse=True)
def asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))


class Gated(nn.Module):
    """A residual branch behind a gate, which begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.gate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.c(h + self.gate * torch.tanh(self.b(h)))


def train(model: Gated, opt: torch.optim.Optimizer, steps: range, scale: float = 1.0) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(64, 8, generator=generator), torch.randint(4, (64,), generator=generator)
        opt.zero_grad()
        (scale * nn.functional.cross_entropy(model(x), y)).backward()
        opt.step()


def is_finite(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_an_inverse_without_a_scale_keeps_the_last_one():
    """That of a factor which has decayed to 1e-34: sums of its rows, times 2¹⁵, are infinite."""
    stored = StoredMatrix.keep(torch.eye(16)[None], 1)
    stored.write(slice(None), 3e38 * torch.eye(16)[None])
    torch.testing.assert_close(stored.value(), torch.eye(16)[None])


def test_a_branch_that_stays_off():
    """Its factors decay by half a step; after some hundred steps nothing is left of them."""
    model = Gated()
    options: dict[str, Any] = {"likelihood": "categorical", "solver": "products", "precision": "half"}
    opt = lw.optim.KFAC(model, factor_decay=0.5, **options)
    model.gate = 1.0
    train(model, opt, range(4))
    model.gate = 0.0
    train(model, opt, range(4, 140))
    assert is_finite(model)


@pytest.mark.parametrize(("options", "scale"), [({"power": 0.75}, 1.0), ({}, 1e4)])
def test_a_branch_that_is_switched_on_between_statistics(options: dict[str, Any], scale: float):
    """Whose factors are still zero: their roots are the identity."""
    model = Gated()
    opt = lw.optim.Shampoo(model, factor_every=10, solver="products", precision="half", **options)
    train(model, opt, range(2), scale)
    model.gate = 1.0
    train(model, opt, range(2, 12), scale)
    assert is_finite(model)


@pytest.mark.parametrize("damping_scale", ["absolute", "relative"])
def test_roots_without_damping_stop_at_rounding(damping_scale: str):
    model = Gated()
    opt = lw.optim.Shampoo(model, solver="products", precision="high", damping=0.0, damping_scale=damping_scale)
    train(model, opt, range(5))
    assert is_finite(model)


@pytest.mark.parametrize("member", ["SOAP", "Shampoo", "EKFAC"])
def test_a_gradient_whose_squares_overflow_is_left_out(member: str):
    model = Gated()
    options: dict[str, Any] = {"likelihood": "categorical", "scaling": "running"} if member == "EKFAC" else {}
    opt = getattr(lw.optim, member)(model, solver="products", precision="high", **options)
    train(model, opt, range(3))
    before = [p.detach().clone() for p in model.parameters()]
    train(model, opt, range(3, 4), 1e23)
    assert opt.health().skipped_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    train(model, opt, range(4, 25))
    assert is_finite(model)
    assert not torch.equal(before[0], model.a.weight)


def test_no_damping_of_factors_that_are_known_adds_nothing():
    two, zero = torch.full((1, 3), 2.0), torch.zeros(1, 3)
    assert [x.item() for x in factored_damping(two, two, 0.0, relative=True)] == [0.0, 0.0, 0.0]
    assert [x.item() for x in factored_damping(two, zero, 0.0, relative=True)] == [0.0, 0.0, 1.0]


def test_a_bound_in_half_precision_stays_finite():
    """Where one row and one column are strong, the entry at which they cross grows by the cut."""
    D = torch.zeros(1, 256, 256)
    D[:, 5], D[:, :, 9], D[:, 5, 9] = 6e4, 6e4, -6e4
    norms = D.flatten(1).norm(dim=1)
    assert float(spectral_cap.capped(D, norms, (256, 256)).abs().max()) > 65504
    assert bool(torch.isfinite(spectral_cap.capped(D.half(), norms, (256, 256))).all())


# --- what a step leaves as it was -----------------------------------------------------------------------------------


@pytest.mark.parametrize("member", ["KFAC", "FOOF", "Shampoo", "SOAP", "Muon"])
def test_a_clip_that_is_never_reached_changes_nothing(member: str):
    ends = []
    for clip in (None, ("norm", 1e9)):
        model = Gated()
        model.gate = 1.0
        options: dict[str, Any] = {"likelihood": "categorical"} if member == "KFAC" else {}
        train(model, getattr(lw.optim, member)(model, clip=clip, **options), range(3))
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-6)


def test_directions_that_lie_in_a_state_stay_there(monkeypatch: pytest.MonkeyPatch):
    """Without factors the direction is AdamW's m itself."""
    found = []
    for gpu in (True, False):
        monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self, gpu=gpu: not gpu))
        model = Gated()
        model.gate = 1.0
        opt = lw.optim.Shampoo(model, max_factor=2)
        train(model, opt, range(4))
        stack = max(opt._stacks or [], key=lambda stack: stack.shape.inputs * stack.requires.matrices_only)
        found.append(float(stack.state["graft_m"].norm()))
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_what_was_loaded_is_let_go():
    model = Gated()
    opt = lw.optim.SOAP(model)
    train(model, opt, range(2))
    other = Gated()
    resumed = lw.optim.SOAP(other)
    resumed.load_state_dict(opt.state_dict())
    assert resumed._loaded
    train(other, resumed, range(2, 4))
    assert not resumed._loaded


def test_members_that_look_at_all_layers_leave_a_bad_step_out():
    model = Gated()
    opt = lw.optim.NGD(model, likelihood="categorical")
    train(model, opt, range(2))
    train(model, opt, range(2, 3), float("nan"))
    assert opt.health().skipped_steps == 1
    train(model, opt, range(3, 5))
    assert is_finite(model)
