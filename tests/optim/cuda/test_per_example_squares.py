"""EKFAC's scalings of a whole stack at once: the same as layer by layer, but for the rounding of half precision."""

from typing import Any

import pytest
import torch
from torch import nn

import layerwise as lw
from layerwise.optim.cuda import backend as cuda_backend
from layerwise.optim.cuda import contraction_orders as example_orders
from layerwise.optim.cuda.contraction_orders import Sizes
from layerwise.optim.cuda.per_example_squares import alike, squares_of_stack
from layerwise.optim.engine import Layerwise
from layerwise.optim.members.ekfac import CorrectedEigenvalues
from layerwise.optim.rule import Observation

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16: torch goes on


def observed(
    monkeypatch: pytest.MonkeyPatch, width: int, hidden: int, positions: int, bias: bool = True, solver: str = "auto"
) -> list[tuple[CorrectedEigenvalues, dict, Any, Any]]:
    """What the rule is given in one step, for each stack of three layers."""
    torch.manual_seed(0)
    parts = [p for _ in range(3) for p in (nn.LayerNorm(width), nn.Linear(width, hidden, bias=bias), nn.Tanh())]
    parts = [p for i in range(0, 9, 3) for p in (*parts[i : i + 3], nn.Linear(hidden, width, bias=bias))]
    model, found = nn.Sequential(*parts), []

    def kept(self: CorrectedEigenvalues, state: dict, seen: Any, context: Any) -> None:
        found.append((self, state, seen, context))

    monkeypatch.setattr(CorrectedEigenvalues, "_rescale_by_examples", kept)
    opt = lw.optim.EKFAC(model, lr=1e-3, scaling="batch", solver=solver, scale="formula")
    with torch.autocast("cpu", torch.bfloat16):
        f = model(torch.randn(4, positions, width))
    f.float().square().sum().backward()
    opt.step()
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("width", "hidden", "positions"), [(32, 16, 5), (16, 32, 40), (48, 16, 20)])
def test_the_same_as_layer_by_layer(
    width: int, hidden: int, positions: int, bias: bool, monkeypatch: pytest.MonkeyPatch
):
    """Whichever side is turned before and whichever after."""
    stacks = observed(monkeypatch, width, hidden, positions, bias)
    assert len(stacks) == 2
    for _, state, seen, context in stacks:
        assert alike(seen.recorded)
        basis = state["basis"]
        exact = torch.cat(
            [
                context.backend.squares_of_layer(basis, slice(k, k + 1), seen.recorded[k], torch.float32)
                for k in range(3)
            ]
        )
        scale = torch.full((3,), 2.0)
        P, Q = (2 * basis.U_P, scale), (2 * basis.U_Q, scale)
        found = squares_of_stack(seen.recorded, P, Q)
        assert found.shape == exact.shape
        assert float((found - exact).norm() / exact.norm()) < 2e-2
        layer = 4 * Sizes.of(seen.recorded[0][0], P[0], Q[0]).bytes
        for most in (2 * layer, layer, 1):  # two layers at a time, one, one example: the same but for roundings
            with monkeypatch.context() as patch:
                patch.setattr(example_orders, "MOST_BYTES", most)
                again = squares_of_stack(seen.recorded, P, Q)
            assert float((again - found).norm() / found.norm()) < 2e-3


def test_wider_bases(monkeypatch: pytest.MonkeyPatch):
    _, state, seen, _ = observed(monkeypatch, 32, 16, 5)[0]
    one = torch.ones(3)
    bases = (state["basis"].U_P, state["basis"].U_Q)
    exact = squares_of_stack(seen.recorded, (bases[0], one), (bases[1], one))
    wide = [torch.stack([torch.block_diag(u, torch.eye(3)) for u in U]) for U in bases]
    found = squares_of_stack(seen.recorded, (wide[0], one), (wide[1], one))
    O, I = exact.shape[1:]
    torch.testing.assert_close(found[:, :O, :I], exact, rtol=1e-2, atol=1e-6)
    assert not found[:, O:].any()
    assert not found[:, :, I:].any()


def test_layers_that_are_not_alike(monkeypatch: pytest.MonkeyPatch):
    _, _, seen, _ = observed(monkeypatch, 32, 16, 5)[0]
    assert not alike([])
    assert not alike([*seen.recorded[:2], []])
    twice = [seen.recorded[0] * 2, *seen.recorded[1:]]
    assert not alike(twice)
    other = [[seen.recorded[0][0]._replace(factor=3.0)], *seen.recorded[1:]]
    assert not alike(other)


@pytest.mark.parametrize("solver", ["auto", "products"])
def test_a_step_takes_them_at_once(solver: str, monkeypatch: pytest.MonkeyPatch):
    """Where it is said to, and with the same scalings."""
    monkeypatch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
    taken = []

    def scalings(at_once: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        opt = lw.optim.EKFAC(model, lr=1e-3, scaling="batch", solver=solver, scale="formula")

        def allowed(device: torch.device, seen: Observation) -> bool:
            taken.append(at_once and alike(seen.recorded))
            return taken[-1]

        monkeypatch.setattr(cuda_backend, "at_once", allowed)
        with torch.autocast("cpu", torch.bfloat16):
            f = model(torch.randn(4, 5, 16))
        f.float().square().sum().backward()
        opt.step()
        return (opt._stacks or [])[0].state["s"]

    expected = scalings(False)
    assert float((scalings(True) - expected).norm() / expected.norm()) < 2e-2
    assert taken == [False, True]


@pytest.mark.parametrize("solver", ["eigh", "products"])
@pytest.mark.parametrize("positions", [5, 40])
def test_scalings_take_them(positions: int, solver: str, monkeypatch: pytest.MonkeyPatch):
    """In every order: long sequences are turned as gradients."""
    with monkeypatch.context() as patch:
        patch.setattr(Layerwise, "host_may_sync", property(lambda self: False))
        stacks = observed(patch, 16, 32, positions, solver=solver)
    monkeypatch.setattr(cuda_backend, "at_once", lambda *_: True)
    made = []
    monkeypatch.setattr(
        cuda_backend, "squares_of_stack", lambda *given: made.append(squares_of_stack(*given)) or made[-1]
    )
    for rule, state, seen, context in stacks:
        before = state["s"].clone()
        rule._rescale_by_examples(state, seen, context)
        assert not torch.equal(state["s"], before)
    assert len(made) == len(stacks)
