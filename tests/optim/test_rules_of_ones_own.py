"""An `UpdateRule` that somebody else has written: the six methods, and what is said of the interface of before."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.errors import InputError
from layerwise.optim.backend import Backend
from layerwise.optim.rule import Context, Observation, Requirements, Shape, State, UpdateRule


class LeftWhitened(UpdateRule):
    """``P^-½ ∇L`` with P the average of ``∇L ∇Lᵀ``."""

    name = "left whitened"
    formula = "P^-½ ∇L"

    def requirements(self, shape: Shape | None = None) -> Requirements:
        return Requirements(gradient=True, refreshes=True, powers=(0.5, None))

    def init(self, shape: Shape, backend: Backend) -> State:
        P = backend.factor("P", shape, shape.outputs, 0.5)
        return {"P": P, "roots": backend.inverse_roots(P, None, (0.5, 0.5), shape)}

    def observe(self, state: State, seen: Observation, context: Context) -> None:
        assert seen.gradient is not None
        new = dict(context.backend.gradient_moments(seen.gradient, ["P"], context))["P"]
        state["P"].update_(new, context.options["factor_decay"], context)

    def refresh(self, state: State, groups: slice, context: Context) -> None:
        state["roots"].refresh_(state["P"], None, self._shift(context), groups, context)
        context.health.refreshes += 1

    def direction(self, state: State, grad: Float[Tensor, "K O I"], context: Context) -> Float[Tensor, "K O I"]:
        return context.backend.tensor(state["roots"].direction(grad, context, self._shift(context)))

    @staticmethod
    def _shift(context: Context):
        return lambda mean_P, mean_Q: (context.damping * mean_P, None)


@pytest.mark.parametrize(("solver", "error"), [("auto", 1e-6), ("products", 1e-2)], ids=["auto", "products"])
def test_a_member_that_uses_P_only(solver: str, error: float):
    """Against the formula; a basis that is followed by sweeps may err by a hundredth of a step."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=False).double()
    opt = lw.optim.Layerwise(model, rule=LeftWhitened(), lr=0.1, damping=0.1, factor_decay=0.5, solver=solver)
    W, P = model.weight.detach().clone(), torch.zeros(3, 3, dtype=torch.float64)
    for step in range(3):
        opt.zero_grad()
        model(torch.randn(7, 5, dtype=torch.float64)).square().mean().backward()
        G = model.weight.grad.clone()
        opt.step()
        weight = 0.5 / (1 - 0.5 ** (step + 1))
        P = P + weight * (G @ G.T - P)
        values, U = torch.linalg.eigh(P + 0.1 * P.trace() / 3 * torch.eye(3, dtype=torch.float64))
        step_taken = 0.1 * (U * values**-0.5) @ U.T @ G
        W = W - step_taken
        assert float((model.weight.detach() - W).norm()) <= error * float(step_taken.norm())
        W = model.weight.detach().clone()
    assert opt.health().refreshes == 3
    state = opt.state_dict()
    opt.load_state_dict(state)
    torch.testing.assert_close(next(iter(opt.state[model.weight].values()))["P"][0], P)


def test_a_rule_for_the_interface_of_before_is_refused_at_once():
    class Old(UpdateRule):
        name = formula = "old"

        def init(self, shape):  # type: ignore[override]
            return {}

        def direction(self, state, grad, context, health):  # type: ignore[override]
            return grad

    with pytest.raises(InputError, match=r"Old with direction\(self, state, grad, context, health\).*context.health"):
        lw.optim.Layerwise(nn.Linear(2, 2), rule=Old())


def test_an_old_option_name_still_works_for_now():
    with pytest.warns(DeprecationWarning, match="cuda_graphs="):
        opt = lw.optim.SGD(nn.Linear(2, 2), record=False)
    assert opt._how[2].cuda_graphs is False


def test_an_option_is_said_once():
    with pytest.raises(InputError, match="samples"):
        lw.optim.KFAC(nn.Linear(2, 2), samples=2, statistics=lw.optim.Statistics(samples=3))
