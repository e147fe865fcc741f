"""Shampoo and SOAP: factors of the gradient itself, and the authors' pseudo-code."""

import pytest
import torch
from optim_tools import (
    Mean,
    Record,
    Reference,
    assert_same_steps,
    batches,
    convnet,
    eye,
    gaussian,
    mean_eigenvalue,
    mlp,
    power,
    squares,
    train_step,
)
from torch import Tensor, nn

import layerwise as lw

pytestmark = pytest.mark.usefixtures("untyped")
LR, DAMPING = 0.01, 1e-3


def data_of(shape: str, steps: int = 20):
    if shape == "conv":
        return convnet(), batches(steps, 2, 4, 4)
    return (mlp(), batches(steps, 4, 5, positions=(4,))) if shape == "sequence" else (mlp(), batches(steps, 5))


def shampoo_direction(p: float, q: float, relative: bool = True, decay: float = 0.9, accumulate: bool = False):
    sides: dict[str, tuple[Mean, Mean]] = {}

    def direction(t: int, grads: dict[str, Tensor], records: dict[str, Record]) -> dict[str, Tensor]:
        found = {}
        for name, G in grads.items():
            means = sides.setdefault(name, (Mean(1.0 if accumulate else decay), Mean(1.0 if accumulate else decay)))
            for mean, M in zip(means, (G @ G.mT, G.mT @ G), strict=True):
                mean.add(M)
            left, right = (mean.total if accumulate else mean.value() for mean in means)
            shifts = [DAMPING * (mean_eigenvalue(M) if relative else 1.0) for M in (left, right)]
            D = power(left + shifts[0] * eye(left), -p) @ G if p else G
            found[name] = D @ power(right + shifts[1] * eye(right), -q) if q else D
        return found

    return direction


@pytest.mark.parametrize("given", [0.25, 0.5, (0.5, 0.0), (0.0, 0.5), (0.25, 0.5)])
def test_powers(given: float | tuple[float, float]):
    model, data = data_of("dense")
    p, q = given if isinstance(given, tuple) else (given, given)
    opt = lw.optim.Shampoo(model, LR, given, DAMPING, 0.9, factor_decay=0.9, refresh_every=1, scale="formula")
    own = Reference(model, shampoo_direction(p, q), squares, LR, momentum=0.9, separate=True)
    assert_same_steps(opt, model, own, data)


@pytest.mark.parametrize("shape", ["sequence", "conv"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_shapes_and_sums(shape: str, accumulate: bool):
    model, data = data_of(shape)
    opt = lw.optim.Shampoo(
        model,
        LR,
        0.25,
        DAMPING,
        0.0,
        0.1,
        factor_decay=0.9,
        accumulate_factors=accumulate,
        refresh_every=1,
        scale="formula",
    )
    direction = shampoo_direction(0.25, 0.25, accumulate=accumulate)
    own = Reference(model, direction, squares, LR, weight_decay=0.1, separate=True)
    assert_same_steps(opt, model, own, data)


def test_absolute_damping_is_added_to_each_factor():
    model, data = data_of("dense")
    opt = lw.optim.Shampoo(
        model, LR, 0.25, DAMPING, 0.0, factor_decay=0.9, refresh_every=1, damping_scale="absolute", scale="formula"
    )
    own = Reference(model, shampoo_direction(0.25, 0.25, relative=False), squares, LR, separate=True)
    assert_same_steps(opt, model, own, data)


def test_on_one_gradient_a_quarter_power_gives_the_orthogonal_factor():
    model = nn.Linear(6, 4, bias=False).double()
    before = model.weight.detach().clone()
    opt = lw.optim.Shampoo(model, lr=1.0, damping=0.0, momentum=0.0, damping_scale="absolute", scale="formula")
    G = gaussian(4, 6)
    (model(torch.eye(6, dtype=G.dtype)) * G.T).sum().backward()
    opt.step()
    U, _, Vh = torch.linalg.svd(G, full_matrices=False)
    assert (before - model.weight - U @ Vh).abs().max() < 1e-9


# --- SOAP -------------------------------------------------------------------------------------------------


def soap_direction(first: dict[str, dict[str, Tensor]], every: int, turn: dict[str, int], b1: float, b2: float):
    """The authors' loop after its first step, which only sets the basis: Adam in it, then factors, then one QR.

    The first basis is given: eigenvectors of a singular matrix are not unique.
    """
    state = {name: {k: saved[k].clone() for k in ("P", "Q", "U_P", "U_Q")} for name, saved in first.items()}
    taken = 0

    def renew(s: dict[str, Tensor], factor: str, axis: int) -> None:
        U, M = s[f"U_{factor}"], s[factor]
        for k in range(len(U)):
            order = (U[k].T @ M[k] @ U[k]).diagonal().argsort(descending=True)
            s["V"][k] = s["V"][k].index_select(axis, order)
            U[k] = torch.linalg.qr(M[k] @ U[k][:, order])[0]

    def direction(t: int, grads: dict[str, Tensor], records: dict[str, Record]) -> dict[str, Tensor]:
        nonlocal taken
        taken += 1
        now = taken + 1  # the optimizer's own count
        found = {}
        for name, G in grads.items():
            s = state[name]
            if taken == 1:
                s["M"], s["V"] = torch.zeros_like(G), torch.zeros_like(G)
            if (now < every and now in (2, 4, 8)) or (now - 1 - turn[name]) % every == 0:
                renew(s, "P", 0)
                renew(s, "Q", 1)
            rotated = s["U_P"].mT @ G @ s["U_Q"]
            s["M"] = b1 * s["M"] + (1 - b1) * G
            s["V"] = b2 * s["V"] + (1 - b2) * rotated**2
            N = (s["U_P"].mT @ s["M"] @ s["U_Q"]) / (s["V"].sqrt() + 1e-8)
            found[name] = (1 - b2**taken) ** 0.5 / (1 - b1**taken) * s["U_P"] @ N @ s["U_Q"].mT
            s["P"] = b2 * s["P"] + (1 - b2) * G @ G.mT
            s["Q"] = b2 * s["Q"] + (1 - b2) * G.mT @ G
        return found

    return direction


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("shape", ["dense", "conv"])
def test_soap_is_the_authors_loop(shape: str, every: int):
    """Square matrices, whose factors have full rank: one QR of a singular product would be rounding alone."""
    model, data = mlp(5, 5, 5, 5), batches(24, 5)
    if shape == "conv":
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
        model, data = model.double(), batches(24, 1, 4, 4)
    opt = lw.optim.SOAP(model, LR, (0.9, 0.8), 1e-8, 0.1, refresh_every=every, scale="formula")
    own = Reference(model, lambda *_: {}, squares, LR, weight_decay=0.1, separate=True)
    own.direction = lambda t, grads, records: {name: torch.zeros_like(G) for name, G in grads.items()}
    train_step(model, opt, data[0], squares)
    own.step(data[0])
    assert all(torch.allclose(dict(model.named_modules())[name].weight, m.weight) for name, m in own.layers())
    saved = {k: v for of in opt.state_dict()["state"].values() for k, v in of.items() if "U_P" in v}
    for s in saved.values():  # the basis of the first gradient's factors, largest first
        for side in ("P", "Q"):
            inside = s[f"U_{side}"].mT @ s[side] @ s[f"U_{side}"]
            values = inside.diagonal(dim1=-2, dim2=-1)
            assert (inside - torch.diag_embed(values)).abs().max() < 1e-12
            assert (values.diff(dim=-1) < 1e-12).all()
    turn = {
        spec.name: number + place for number, stack in enumerate(opt._stacks) for place, spec in enumerate(stack.specs)
    }
    own.direction = soap_direction(saved, every, turn, 0.9, 0.8)
    assert_same_steps(opt, model, own, data[1:], tol=1e-6)


def test_soap_may_move_at_the_first_step():
    """Then ``U_P sign U_Qᵀ``-like: in the basis of the gradient itself the first step is ``U Vᵀ``."""
    model = nn.Linear(4, 4, bias=False).double()
    before = model.weight.detach().clone()
    opt = lw.optim.SOAP(model, lr=1.0, skip_first=False, scale="formula")
    G = gaussian(4, 4)
    (model(torch.eye(4, dtype=G.dtype)) * G.T).sum().backward()
    opt.step()
    U, _, Vh = torch.linalg.svd(G)
    # U_Pᵀ G U_Q is ±S on the diagonal and rounding elsewhere, where ε decides
    found = U.T @ (before - model.weight) @ Vh.T
    assert (found.diagonal() - 1).abs().max() < 1e-6
    assert (found - found.diagonal().diag()).abs().max() < 1e-5
