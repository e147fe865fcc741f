"""The direction by products, applied as it is kept, against eigh in float64: within 1e-2.

Damping is 1e-3 of each factor's mean eigenvalue. Inverses are exact at every refresh. Bases are begun by products, and
take one sweep after the factors have drifted.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from gpu_objects import context_at, initial_state, set_factors
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.kronecker import KroneckerRoots
from layerwise.optim.members.ekfac import CorrectedEigenvalues
from layerwise.optim.rule import Health, Shape
from random_tensors import randn64 as randn
from sweeps_in_double import coupled as off_diagonal

pytestmark = pytest.mark.usefixtures("untyped")
LIMIT, DAMPING = 1e-2, 1e-3
COUPLED = {"Shampoo": 0.09, "Shampoo, power ½": 0.045, "EKFAC": 0.03}
"""Couplings up to which one sweep leaves an error of `LIMIT` at most."""
EXACT = {"EKFAC": 6e-2, "Shampoo, power ¾": 3e-2}
"""Of ill-conditioned factors, where steps are made of their eigenvalues with large powers (K-FAC with exact damping,
whose power is 1): rounding the basis to fp16 turns it by 2⁻¹², and what a gradient has in the largest direction is a
thousand times the smallest. Errors of 0.054 (factors of a training; 0.021 of random ones) and 0.018 were found; with
solver="eigh" there are none (decision 11)."""
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A rule, and what it should apply: ``(P + λ)⁻ᵖ Z (Q + λ)⁻ᵖ``, or ``Z / (s_P ⊗ s_Q + λ)`` in the eigenbasis."""

    rule: KroneckerRoots | CorrectedEigenvalues
    power: float
    damping: float
    """As the rule takes it."""

    def expected(self, P: Tensor, Q: Tensor, Z: Tensor) -> Tensor:
        """In float64."""
        (s, U), (t, V) = torch.linalg.eigh(P), torch.linalg.eigh(Q)
        Y = U.mT @ Z @ V
        s, t = s.clamp_min(0), t.clamp_min(0)
        if isinstance(self.rule, CorrectedEigenvalues):
            both = s[:, :, None] * t[:, None, :]
            return U @ (Y / (both + self.damping * both.mean((-2, -1), keepdim=True))) @ V.mT
        left = (s + DAMPING * s.mean(-1, keepdim=True)).pow(-self.power)
        right = (t + DAMPING * t.mean(-1, keepdim=True)).pow(-self.power)
        return U @ (left[:, :, None] * Y * right[:, None, :]) @ V.mT


CASES = {
    # λ of P ⊗ Q is relative: each of two factors takes its root.
    "K-FAC": lambda: Case(KroneckerRoots("outgrads", "inputs", (1.0, 1.0)), 1.0, DAMPING**2),
    "Shampoo": lambda: Case(KroneckerRoots("gradient", "gradient", (0.25, 0.25)), 0.25, DAMPING),
    "Shampoo, power ½": lambda: Case(KroneckerRoots("gradient", "gradient", (0.5, 0.5)), 0.5, DAMPING),
    "Shampoo, power ¾": lambda: Case(KroneckerRoots("gradient", "gradient", (0.75, 0.75)), 0.75, DAMPING),
    "EKFAC": lambda: Case(CorrectedEigenvalues(scaling="none"), 1.0, DAMPING),
}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def factor(n: int, condition: float, seed: int) -> Tensor:
    """Random bases, geometric spectra; two groups."""
    U = torch.linalg.qr(randn(2, n, n, seed=seed))[0]
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)), n, dtype=torch.float64)
    return (U * values) @ U.mT


def half(M: Tensor, power: float = 0.5) -> Tensor:
    values, vectors = torch.linalg.eigh(M)
    return (vectors * values.clamp_min(0).pow(power).unsqueeze(-2)) @ vectors.mT


def sampled(M: Tensor, seed: int) -> Tensor:
    """A sample covariance of M, of twice as many rows as M has."""
    n = M.shape[-1]
    X = half(M) @ randn(len(M), n, 2 * n, seed=seed)
    return X @ X.mT / (2 * n)


def drifted(M: Tensor, seed: int) -> Tensor:
    """Five in a hundred are replaced."""
    return 0.95 * M + 0.05 * sampled(M, seed)


def drifts(P: Tensor, Q: Tensor, steps: int) -> Iterator[Pair]:
    for seed in range(steps):
        yield P, Q
        P, Q = drifted(P, 2 * seed), drifted(Q, 2 * seed + 1)


def applied_errors(case: Case, factors: list[Pair], device: str) -> tuple[dict[str, float], Health]:
    """Relative errors on random Z and on gradients ``P^½ Z Q^½``, after a refresh for each pair of factors."""
    K, O, I = len(factors[0][0]), factors[0][0].shape[-1], factors[0][1].shape[-1]
    shape = Shape(K, O, I, torch.float32, torch.device(device))
    state, health, memory = initial_state(case.rule, shape), Health(), {"fresh": [False] * K}
    context = context_at(0, case.damping, shape, health=health, memory=memory)
    for turn, (P, Q) in enumerate(factors):
        set_factors(state, P=P.float(), Q=Q.float())
        context = context_at(101 + 10 * turn, case.damping, shape, health=health, memory=memory)
        case.rule.refresh(state, slice(0, K), context)
        memory["fresh"] = [True] * K
    P, Q = (state[side].dense().double().cpu() for side in ("P", "Q"))
    Z = randn(K, O, I, seed=77)
    found = {}
    for kind, G in (("random", Z), ("gradient", half(P) @ Z @ half(Q))):
        G = G.float()
        D = context.backend.tensor(case.rule.direction(state, G.to(device), context)).double().cpu()
        truth = case.expected(P, Q, G.double())
        found[kind] = float(((D - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)).max())
    return found, health


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("name", CASES)
def test_random_factors(name: str, condition: float, device: str):
    P, Q = factor(96, condition, 1), factor(130, condition, 2)
    found, health = applied_errors(CASES[name](), [*[(P, Q)] * 3, *drifts(P, Q, 4)], device)
    assert max(found.values()) <= limit_of(name, condition), found
    assert health.fallbacks == 0


def limit_of(name: str, condition: float = 1e6) -> float:
    return EXACT.get(name, LIMIT) if condition >= 1e6 else LIMIT


def coupled(M: Tensor, other: Tensor, coupling: float) -> Tensor:
    """M with so much of another factor that its eigenvectors are coupled so far, nearly."""
    weight, U = 0.05, torch.linalg.eigh(M)[1]
    for _ in range(4):
        found = off_diagonal(M.lerp(other, weight), U).max()
        weight = min(1.0, weight * coupling / float(found))
    return M.lerp(other, weight)


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("name", COUPLED)
def test_one_sweep_suffices_up_to_the_limit(name: str, condition: float, device: str):
    """From the basis of before."""
    P, Q = factor(96, condition, 1), factor(130, condition, 2)
    found = errors_at_the_limit(name, (P, Q), (sampled(P, 3), sampled(Q, 4)), device)
    assert max(found.values()) <= limit_of(name, condition), found


def errors_at_the_limit(name: str, factors: Pair, others: Pair, device: str) -> dict[str, float]:
    """After one sweep from the basis of before, with the largest coupling for which one should do."""
    P, Q = (coupled(M, other, 0.99 * COUPLED[name]) for M, other in zip(factors, others, strict=True))
    return applied_errors(CASES[name](), [*[factors] * 8, (P, Q)], device)[0]


@pytest.mark.parametrize("name", CASES)
def test_a_first_refresh(name: str, device: str):
    """By products of blocks at once; a basis, begun by orthogonal iteration, after seven refreshes more."""
    both = factor(160, 1e6, 3), factor(97, 1e6, 4)
    found, _ = applied_errors(CASES[name](), [both], device)
    assert max(found.values()) <= (LIMIT if name == "K-FAC" else 5 * LIMIT), found
    found, _ = applied_errors(CASES[name](), [both] * 8, device)
    assert max(found.values()) <= limit_of(name), found


# --- factors of a training ---------------------------------------------------------------------------------

CLASSES, WIDTH, LENGTH = 13, 24, 8


class Transformer(nn.Module):
    """One block: embedding, attention, two layers behind it, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.place = nn.Parameter(0.3 * torch.randn(LENGTH, WIDTH))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.place
        q, k, v = self.qkv(self.norms[0](h)).chunk(3, -1)
        h = h + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        h = h + self.down(torch.nn.functional.gelu(self.up(self.norms[1](h))))
        return self.head(self.norms[2](h))


@pytest.fixture(scope="module", params=[pytest.param(0, marks=pytest.mark.slow), 4])
def captured(request: pytest.FixtureRequest) -> list[tuple[str, list[Pair]]]:
    """P and Q of every layer, after each of the last four of thirty steps of K-FAC on sums of neighbours.

    Trainings differ between machines, and numbers of threads, by rounding. The second turns its bases fast.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(request.param)
        model = Transformer()
    opt = lw.optim.KFAC(model, lr=0.01, solver="cholesky", loss_average="tokens", scale="formula")
    found: dict[str, list[Pair]] = {}
    for step in range(30):
        x = torch.randint(CLASSES, (96, LENGTH), generator=generator(step + 100 * request.param))
        y = (x + x.roll(1, 1)) % CLASSES
        opt.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        opt.step()
        if step >= 26:
            for of_param in opt.state_dict()["state"].values():
                for layer, of_layer in of_param.items():
                    if "P" in of_layer and of_layer["Q"].ndim == 3:
                        found.setdefault(layer, []).append((of_layer["P"].double(), of_layer["Q"].double()))
    return list(found.items())


@pytest.mark.parametrize("name", CASES)
def test_factors_of_a_training(name: str, captured: list[tuple[str, list[Pair]]], device: str):
    """An inverse is right at once. Factors of a small model change fast: a basis may need further refreshes of them."""
    assert {layer for layer, _ in captured} >= {"qkv", "out", "up", "down", "head"}
    for layer, factors in captured:
        found, health = applied_errors(CASES[name](), factors, device)
        if name != "K-FAC" and max(found.values()) > limit_of(name):
            found, health = applied_errors(CASES[name](), [*factors, *[factors[-1]] * 3], device)
        assert max(found.values()) <= limit_of(name), (layer, found)
        assert health.fallbacks == 0


@pytest.mark.parametrize("name", COUPLED)
def test_one_sweep_of_factors_of_a_training(name: str, captured: list[tuple[str, list[Pair]]], device: str):
    """Up to the limit; the way from one factor to a later one is taken as straight."""
    for layer, factors in captured:
        found = errors_at_the_limit(name, factors[0], factors[-1], device)
        assert max(found.values()) <= limit_of(name), (layer, found)
