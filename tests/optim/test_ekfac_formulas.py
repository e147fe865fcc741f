"""EKFAC: basis of the factors, second moments of gradients in it, by per-example gradients and by running averages."""

import pytest
import torch
from optim_tools import Mean, Record, Reference, assert_same_steps, batches, convnet, cross_entropy, mlp
from torch import Tensor

import layerwise as lw
from layerwise.optim.channels import times_inputs
from layerwise.optim.members.ekfac import CorrectedEigenvalues

pytestmark = pytest.mark.usefixtures("untyped")
DAMPING = 0.03
LR = 0.01


class Basis:
    """Averages of the factors, and their eigenvectors at the last refresh."""

    def __init__(self, decay: float = 0.95) -> None:
        self.P, self.Q = Mean(decay), Mean(decay)
        self.scalings: Tensor | None = None

    def observe(self, seen: Record) -> None:
        self.P.add(seen.P())
        self.Q.add(seen.Q())

    def refresh(self) -> None:
        self.s_P, self.U_P = torch.linalg.eigh(self.P.value())
        self.s_Q, self.U_Q = torch.linalg.eigh(self.Q.value())
        self.s_P, self.s_Q = self.s_P.clamp_min(0), self.s_Q.clamp_min(0)
        self.scalings = torch.einsum("ko,ki->koi", self.s_P, self.s_Q)

    def rotate(self, G: Tensor) -> Tensor:
        return self.U_P.mT @ G @ self.U_Q

    def solve(self, G: Tensor, split: str = "exact", relative: bool = True) -> Tensor:
        assert self.scalings is not None
        s = self.scalings
        m_P, m_Q = self.s_P.mean(-1), self.s_Q.mean(-1)
        if split == "exact":
            added = DAMPING * s.mean((-2, -1), keepdim=True) if relative else torch.as_tensor(DAMPING)
        else:  # (s_P + left)(s_Q + right) − s_P s_Q
            root = DAMPING**0.5
            pi = (m_Q / m_P).sqrt() if split == "trace" else torch.ones_like(m_P)
            left, right = (root * m_P, root * m_Q) if relative else (root / pi, root * pi)
            whole = (self.s_P + left[:, None]).unsqueeze(-1) * (self.s_Q + right[:, None]).unsqueeze(-2)
            added = whole - self.s_P.unsqueeze(-1) * self.s_Q.unsqueeze(-2)
        return self.U_P @ (self.rotate(G) / (s + added)) @ self.U_Q.mT


def data_of(shape: str, steps: int = 20):
    if shape == "conv":
        return convnet(), batches(steps, 2, 4, 4)
    return (mlp(), batches(steps, 4, 5, positions=(4,))) if shape == "sequence" else (mlp(), batches(steps, 5))


def check(shape: str, scaling: str, split: str = "exact", relative: bool = True, **options) -> None:
    model, data = data_of(shape)
    state: dict[str, Basis] = {}

    def direction(t: int, grads: dict[str, Tensor], records: dict[str, Record]) -> dict[str, Tensor]:
        found = {}
        for name, G in grads.items():
            basis, seen = state.setdefault(name, Basis()), records[name]
            basis.observe(seen)
            basis.refresh()
            n = seen.a.shape[0]
            if scaling == "batch":
                rows = seen.rows()
                basis.scalings = basis.rotate(rows).square().sum((0, 1)) / n
            else:
                basis.scalings = 0.75 * basis.scalings + 0.25 * n * basis.rotate(G).square()
            found[name] = basis.solve(G, split, relative)
        return found

    opt = lw.optim.EKFAC(
        model, LR, DAMPING, 0.9, scaling=scaling, damping_split=split, refresh_every=1,
        damping_scale="relative" if relative else "absolute", **options, clip=None, scale="formula",
    )  # fmt: skip
    assert_same_steps(opt, model, Reference(model, direction, cross_entropy, LR, momentum=0.9), data, 1e-7)


@pytest.mark.parametrize("scaling", ["batch", "running"])
@pytest.mark.parametrize("shape", ["dense", "sequence", "conv"])
def test_scalings(shape: str, scaling: str):
    check(shape, scaling)


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("split", ["exact", "equal", "trace"])
def test_damping_of_the_scalings(split: str, relative: bool):
    check("dense", "batch", split, relative)


@pytest.mark.parametrize("scaling", ["batch", "running"])
def test_scalings_follow_in_an_old_basis(scaling: str):
    """Between refreshes the basis stays and the scalings move; a refresh of "running" begins with ``s_P s_Qᵀ``."""
    model, data = data_of("dense", 24)
    turn = {"0": 0, "2": 1, "4": 1}
    state: dict[str, Basis] = {}

    def direction(t: int, grads: dict[str, Tensor], records: dict[str, Record]) -> dict[str, Tensor]:
        found = {}
        for name, G in grads.items():
            basis, seen = state.setdefault(name, Basis()), records[name]
            basis.observe(seen)
            if t in (1, 2, 4) or (t - 1 - turn[name]) % 6 == 0:
                basis.refresh()
            n = seen.a.shape[0]
            if scaling == "batch":
                basis.scalings = basis.rotate(seen.rows()).square().sum((0, 1)) / n
            else:
                basis.scalings = 0.5 * basis.scalings + 0.5 * n * basis.rotate(G).square()
            found[name] = basis.solve(G)
        return found

    opt = lw.optim.EKFAC(
        model,
        LR,
        DAMPING,
        0.0,
        scaling=scaling,
        scaling_decay=0.5,
        damping_split="exact",
        refresh_every=6,
        clip=None,
        scale="formula",
    )
    assert_same_steps(opt, model, Reference(model, direction, cross_entropy, LR), data)


def test_the_engine_gives_ekfac_by_its_basis():
    a, b = mlp(), mlp()
    one = lw.optim.EKFAC(a, LR, DAMPING, 0.0, damping_split="exact", refresh_every=2, clip=None, scale="formula")
    other = lw.optim.Layerwise(b, "outgrads", "inputs", 1.0, "eigen", lr=LR, damping=DAMPING, refresh_every=2)
    for x, y in batches(5, 5):
        for model, opt in ((a, one), (b, other)):
            opt.zero_grad()
            cross_entropy(model(x), y).backward()
            opt.step()
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("shape", ["dense", "conv"])
def test_the_average_of_the_gradient_is_kept_in_the_basis(shape: str, momentum: float):
    """With updates of AdamW's size; whatever has become of the basis, it is that of the gradients."""
    model, data = data_of(shape, 9)
    opt = lw.optim.EKFAC(model, 1e-3, momentum=momentum, scaling="running", refresh_every=3)
    averages: dict[str, Tensor] = {}
    for x, y in data:
        opt.zero_grad()
        cross_entropy(model(x), y).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            averages[name] = averages.get(name, torch.zeros_like(p)).lerp(p.grad, 1 - momentum)
        opt.step()
    checked = 0
    for name, p in model.named_parameters():
        ((_, state),) = opt.state[p].items()
        if "M" not in state:  # of a bias
            continue
        expected = averages[name].reshape(state["M"].shape)
        found = state["U_P"] @ state["M"] @ state["U_Q"].mT
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        assert float((state["M"] - expected).norm()) > 0.1 * float(expected.norm()), "not merely the average"
        checked += 1
    assert checked > 1


@pytest.mark.parametrize(("before", "after"), [("KFAC", "EKFAC"), ("EKFAC", "EKFAC with SUA"), ("EKFAC", "EKFAC")])
def test_the_average_is_taken_over(before: str, after: str):
    """From AdamW's m, which is out of any basis, where the basis of M does not come with it."""
    members = {
        "KFAC": lambda m: lw.optim.KFAC(m, 1e-3, refresh_every=3),
        "EKFAC": lambda m: lw.optim.EKFAC(m, 1e-3, scaling="running", refresh_every=3),
        "EKFAC with SUA": lambda m: lw.optim.EKFAC(m, 1e-3, scaling="running", refresh_every=3, sua=True),
    }
    model, data = data_of("conv", 8)
    opt = members[before](model)

    def train(batches: list) -> None:
        for x, y in batches:
            opt.zero_grad()
            cross_entropy(model(x), y).backward()
            opt.step()

    def averages() -> list[Tensor]:
        """Of kernels, out of the basis."""
        found = []
        for p in model.parameters():
            ((_, state),) = opt.state[p].items()
            if p.ndim == 4:
                found.append(state["graft_m"])
                if "M" in state:
                    found[-1] = times_inputs(state["U_P"] @ state["M"], state["U_Q"].mT)
        return found

    train(data[:6])
    kept, saved = averages(), opt.state_dict()
    opt = members[after](model)
    opt.load_state_dict(saved)
    train(data[6:7])
    for old, new, p in zip(kept, averages(), [p for p in model.parameters() if p.ndim == 4], strict=True):
        assert p.grad is not None
        torch.testing.assert_close(new, old.lerp(p.grad.reshape(old.shape), 0.1), rtol=1e-7, atol=1e-10)


def test_an_average_without_its_basis_is_left():
    """Where AdamW's m has some rows alone it is begun anew, not taken for that of another basis."""
    rule = CorrectedEigenvalues(averages=True)
    M, U, some = torch.ones(1, 4, 6), torch.eye(4)[None], torch.ones(1, 2, 6)
    sizes = {"M": (4, 6), "U_P": (4, 4), "U_Q": (6, 6)}
    found = {"M": M, "U_P": U, "graft_m": some}
    assert rule.taken_over(found, sizes) == {"U_P": U, "graft_m": some}
    whole = found | {"U_Q": torch.eye(6)[None]}
    assert rule.taken_over(whole, sizes) is whole
