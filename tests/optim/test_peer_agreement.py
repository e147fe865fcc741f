"""Shampoo, SOAP and Muon against other people's code under equal settings: pytorch-optimizer 4.1, and torch itself.

pytorch-optimizer is not a dependency; its tests are skipped where it is absent. `pip install pytorch-optimizer`.
"""

import importlib
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from optim_tools import Batch, batches, flat, mlp, squares, train_step
from torch import nn

import layerwise as lw
from layerwise.optim import newton_schulz as spectral
from layerwise.optim.members import muon

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        peers: Any = importlib.import_module("pytorch_optimizer")
    except ImportError:
        peers = None

needs_peers = pytest.mark.skipif(peers is None, reason="pytorch-optimizer is not installed: it is no dependency")
pytestmark = pytest.mark.usefixtures("untyped")
STEPS = 12
LR = 0.02


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def vectors(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 1]


def assert_agree(
    make: Callable[[], nn.Module],
    ours: Callable[[nn.Module], torch.optim.Optimizer],
    theirs: Callable[[nn.Module], Sequence[torch.optim.Optimizer]],
    data: Sequence[Batch],
    tol: float,
    before_step: Callable[[torch.optim.Optimizer, int], None] = lambda opt, t: None,
    equalize: bool = False,
) -> None:
    """The same parameters after every step, and they did move; `equalize` sets theirs to ours after each."""
    mine, other = make(), make()
    start = flat(mine)
    opt, peer = ours(mine), theirs(other)
    for t, (x, y) in enumerate(data, start=1):
        before_step(opt, t)
        train_step(mine, opt, (x, y), squares)
        for one in peer:
            one.zero_grad()
        squares(other(x), y).backward()
        for one in peer:
            one.step()
        error = float((flat(mine) - flat(other)).abs().max())
        assert error < tol, f"step {t}: {error:.3g}"
        if equalize:
            other.load_state_dict(mine.state_dict())
    assert float((flat(mine) - start).abs().max()) > LR


# --- Shampoo ----------------------------------------------------------------------------------------------


@needs_peers
@pytest.mark.parametrize("sizes", [(5, 5, 5, 3), (4, 7, 3)])
def test_shampoo(sizes: tuple[int, ...]):
    """``(εI + Σ∇L∇Lᵀ)^-¼ ∇L (εI + Σ∇Lᵀ∇L)^-¼``: sums from εI are sums with absolute damping ε.

    What cannot be equal, and is left out: its momentum mixes the last preconditioned direction into the raw gradient
    (and so into the factors), ours averages directions; to a bias it gives a full-matrix AdaGrad, ours the fallback.
    """
    eps = 1e-3
    assert_agree(
        lambda: mlp(*sizes, bias=False),
        lambda m: lw.optim.Shampoo(
            m, LR, 0.25, eps, 0.0, accumulate_factors=True, damping_scale="absolute", refresh_every=1, scale="formula"
        ),
        lambda m: [peers.Shampoo(m.parameters(), lr=LR, momentum=0.0, matrix_eps=eps)],
        batches(STEPS, sizes[0]),
        1e-10,
    )


SIDES = {"ALL": (0.25, 0.25), "INPUT": (0.5, 0.0), "OUTPUT": (0.0, 0.5)}
"""Their names of the sides, which count axes of the weight from the first, and our powers."""


def scalable(model: nn.Module, beta: float, sides: str, graft: str, eps: float, **options: Any) -> Any:
    """Its settings without blocks, warm-up and merged axes, with exact roots."""
    partition = importlib.import_module("pytorch_optimizer.optimizer.utils.partition")
    grafting = importlib.import_module("pytorch_optimizer.optimizer.utils.graft")
    return peers.ScalableShampoo(
        model.parameters(), lr=LR, matrix_eps=eps, use_svd=True, shape_interpretation=False,
        start_preconditioning_step=1, preconditioning_compute_steps=1,
        pre_conditioner_type=partition.PreConditionerType[sides], graft_type=grafting.LayerWiseGrafting[graft],
        betas=(options.pop("momentum", 0.0), beta), **options,
    )  # fmt: skip


@needs_peers
@pytest.mark.parametrize("sides", SIDES)
def test_scalable_shampoo(sides: str):
    """Averages. Theirs start at εI and are not corrected for it, ``S = βᵗεI + (1−βᵗ) P``; ours are, ``P + λI``.

    So ``S^-p = (1−βᵗ)^-p (P + λI)^-p`` at ``λ = βᵗε/(1−βᵗ)``: a schedule of the damping and one of the learning rate
    (the powers of both sides add up to ½) make them equal.
    """
    eps, beta = 1e-2, 0.9

    def correct(opt: torch.optim.Optimizer, t: int) -> None:
        opt.param_groups[0]["lr"] = LR / math.sqrt(1 - beta**t)

    assert_agree(
        lambda: mlp(5, 6, 4, bias=False),
        lambda m: lw.optim.Shampoo(
            m, LR, SIDES[sides], lambda t: beta**t * eps / (1 - beta**t), 0.0, factor_decay=beta,
            damping_scale="absolute", refresh_every=1, scale="formula",
        ),
        lambda m: [scalable(m, beta, sides, "NONE", eps, nesterov=False)],
        batches(STEPS, 5),
        1e-10,
        correct,
    )  # fmt: skip


@needs_peers
@pytest.mark.parametrize("nesterov", [False, True])
def test_scalable_shampoo_with_graft_momentum_decay_and_biases(nesterov: bool):
    """The grafted norm cancels the scale of the averages: only the damping's schedule is left of the above.

    Biases are not preconditioned on either side: gradient descent with the same momentum and decay.
    """
    eps, beta = 1e-2, 0.9
    assert_agree(
        lambda: mlp(5, 6, 4),
        lambda m: lw.optim.Shampoo(
            m, LR, 0.25, lambda t: beta**t * eps / (1 - beta**t), 0.9, 0.1, factor_decay=beta, nesterov=nesterov,
            damping_scale="absolute", refresh_every=1, graft="gradient", update_fallback="sgd", scale="formula",
        ),
        lambda m: [
            scalable(
                m, beta, "ALL", "SGD", eps, momentum=0.9, nesterov=nesterov, weight_decay=0.1,
                decoupled_weight_decay=True,
            )
        ],
        batches(STEPS, 5),
        1e-10,
    )  # fmt: skip


# --- SOAP -------------------------------------------------------------------------------------------------


def soap_without_cast() -> Any:
    module = importlib.import_module("pytorch_optimizer.optimizer.soap")
    source, cast = inspect.getsource(module), "power_iter.to(torch.float32)"
    assert source.count(cast) == 1
    names: dict[str, Any] = {}
    exec(compile(source.replace(cast, "power_iter"), "soap_without_cast", "exec"), names)
    return names["SOAP"]


@needs_peers
@pytest.mark.parametrize("as_shipped", [True, False])
@pytest.mark.parametrize("betas", [(0.95, 0.95), (0.9, 0.8)])
def test_soap(betas: tuple[float, float], as_shipped: bool):
    """Adam in the eigenbasis, the first step skipped by both; the basis renewed at every step.

    Settings that cannot be equal, and are kept out of the way:
    - other frequencies: theirs renews all layers after step f + 1, 2f + 1, …; ours in turns, and at the doublings;
    - weight decay: theirs multiplies after the step, ``(1 − ηλ)(W − ηD)``, ours before, ``(1 − ηλ)W − ηD``;
    - biases: theirs have SOAP's own betas and skip the first step too, ours are the fallback's;
    - matrices that are not square: the basis of a factor's null space is arbitrary in both.
    As shipped, theirs does its QR in float32 whatever the parameters are in: its basis is orthogonal to 6e-8 only, and
    steps are off by that (5e-7 after twelve). With that one cast taken out of its source they agree to 1e-10.
    """
    SOAP = peers.SOAP if as_shipped else soap_without_cast()
    assert_agree(
        lambda: mlp(5, 5, 5, 5, bias=False),
        lambda m: lw.optim.SOAP(m, LR, betas, 1e-8, refresh_every=1, scale="formula"),
        lambda m: [SOAP(m.parameters(), lr=LR, betas=betas, eps=1e-8, weight_decay=0.0, precondition_frequency=1)],
        batches(STEPS, 5),
        1e-6 if as_shipped else 1e-10,
    )


# --- Muon -------------------------------------------------------------------------------------------------

ROUNDING = 2**-7
"""One unit in the last place of bfloat16 at 1: what an entry of the orthogonal factor may be off by.

The iteration is in bfloat16 as shipped, by both: the last bit of a float64 average can decide how it is rounded. It
did at 6 of 400 steps measured; the others agreed to 1e-10. Parameters are set equal after each comparison (averages are
not), so that it stays at that; the same steps in float64 agree to 1e-10 without.
"""
in_bfloat16 = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without: torch says so and goes on


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """What the fallback does for biases."""
    return torch.optim.AdamW(vectors(model), LR, weight_decay=0.1)


@in_bfloat16
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_of_torch(nesterov: bool, adjust: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spectral, "fast_bfloat16", lambda device: True)  # torch's is in bfloat16 on every CPU
    assert_agree(
        lambda: mlp(4, 7, 7, 3),
        lambda m: lw.optim.Muon(m, LR, 0.9, nesterov, 0.1, adjust=adjust, scale="formula"),
        lambda m: [torch.optim.Muon(matrices(m), LR, 0.1, 0.9, nesterov, adjust_lr_fn=adjust), adam(m)],
        batches(STEPS, 4),
        LR * ROUNDING,
        equalize=True,
    )


def their_muon(m: nn.Module, nesterov: bool, adjust: str) -> list[torch.optim.Optimizer]:
    """Its AdamW group with the fallback's betas and eps."""
    hidden = {"params": matrices(m), "lr": LR, "weight_decay": 0.1, "use_muon": True}
    rest = {"params": vectors(m), "lr": LR, "weight_decay": 0.1, "use_muon": False}
    rest |= {"betas": (0.9, 0.999), "eps": 1e-8}
    return [peers.Muon([hidden, rest], momentum=0.9, nesterov=nesterov, use_adjusted_lr=adjust == "match_rms_adamw")]


@in_bfloat16
@needs_peers
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon(nesterov: bool, adjust: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """As shipped (bfloat16), and with the iteration of both in float64."""
    monkeypatch.setattr(spectral, "fast_bfloat16", lambda device: True)
    exact = dtype == torch.float64
    if exact:
        base = importlib.import_module("pytorch_optimizer.optimizer.muon.base")
        for module, name in ((base, "zero_power_via_newton_schulz_5"), (muon, "newton_schulz")):
            monkeypatch.setattr(module, name, partial(getattr(module, name), dtype=dtype))
    assert_agree(
        lambda: mlp(4, 7, 7, 3),
        lambda m: lw.optim.Muon(m, LR, 0.9, nesterov, 0.1, adjust=adjust, scale="formula"),
        lambda m: their_muon(m, nesterov, adjust),
        batches(STEPS, 4),
        1e-10 if exact else LR * ROUNDING,
        equalize=not exact,
    )
