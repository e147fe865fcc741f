"""How good the structures of the Fisher matrix are on a small trained network, and that they agree where they must.

The network, the data and the measures are those of `examples/fisher_structures.py`: a 64-20-10 tanh network on
digits, exact softmax Fisher on 400 examples, 20 random directions, float64, two seeds, three steps of training.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw

EXAMPLE = Path(__file__).parents[2] / "examples" / "fisher_structures.py"
pytest.importorskip("sklearn")
pytestmark = pytest.mark.slow
"""`make test` runs the example itself; its numbers take twelve seconds."""


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fisher_structures", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo = _load()


@dataclass(frozen=True)
class Measured:
    """One snapshot: the network, the exact matrices, and a row of the table for each structure."""

    model: nn.Module
    loss: float
    matrices: dict[str, lw.ParamMatrix]
    rows: dict


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, Tensor]:
    x, y = demo.digits()
    return x[:400], y[:400]


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.slow)], ids=["seed0", "seed1"])
def snapshots(request: pytest.FixtureRequest, batch: tuple[Tensor, Tensor]) -> dict[int, Measured]:
    seed: int = request.param
    found = {}
    for step, loss, model in demo.train(*demo.digits(), seed=seed):
        matrices = demo.matrices(model, *batch)
        rows = demo.measure(matrices, demo.sphere(1510, seed=seed))
        found[step] = Measured(model, loss, matrices, {row.name: row for row in rows})
    return found


# --- G1: quality -----------------------------------------------------------------------------------------


def test_the_training_is_that_of_the_card(snapshots):
    """Loss 2.3 at the start, about 0.38 after 50 steps and 0.02 after 1000."""
    losses = [snapshots[step].loss for step in (0, 50, 1000)]
    assert losses == pytest.approx([2.3, 0.38, 0.02], abs=0.06)


@pytest.mark.parametrize("name", ["diag", "block", "quasidiag", "ekfac"])
def test_trace_is_that_of_the_dense_matrix(snapshots, name):
    for measured in snapshots.values():
        assert measured.rows[name].trace < 1e-10


def test_kfac_changes_the_trace_a_little(snapshots):
    for measured in snapshots.values():
        assert 1e-3 < measured.rows["kfac exact"].trace < 0.1


def test_ekfac_is_nearer_than_kfac_in_frobenius_norm(snapshots):
    for step, measured in snapshots.items():
        gain = measured.rows["kfac exact"].frobenius - measured.rows["ekfac"].frobenius
        assert gain >= (0.0 if step == 0 else 0.005)


def test_block_is_nearest_in_frobenius_norm(snapshots):
    """Not on the card; it follows from keeping a superset of the entries."""
    for measured in snapshots.values():
        best = min(measured.rows.values(), key=lambda row: row.frobenius)
        assert best.name == "block"


def test_order_of_products(snapshots):
    """block > ekfac ≥ kfac − 0.01 > diag + 0.1."""
    for measured in snapshots.values():
        rows = measured.rows
        block, ekfac, kfac, diag = (rows[name].product for name in ("block", "ekfac", "kfac exact", "diag"))
        assert block > ekfac >= kfac - 0.01 > diag + 0.1


def test_solves_improve_with_damping(snapshots):
    for measured in snapshots.values():
        for row in measured.rows.values():
            assert list(row.solve) == sorted(row.solve), row.name
            assert row.solve[-1] > 0.96, row.name


def test_factored_damping_wins_at_small_and_loses_at_large_damping(snapshots):
    rows = snapshots[0].rows
    exact, factored = rows["kfac exact"].solve, rows["kfac trace"].solve
    assert factored[0] - exact[0] >= 0.1
    assert exact[-1] - factored[-1] >= 0.01


def _sampled_trace(model: nn.Sequential, x: Tensor, samples: int) -> tuple[float, float]:
    """Mean and standard deviation of the trace from sampled labels, in closed form and without the library.

    A label y drawn from p gives ``t = Σ_l |g_l|² (|a_l|² + 1)``, a sum over the two layers.
    """
    with torch.no_grad():
        hidden = torch.tanh(model[0](x))
        p = model[2](hidden).softmax(1)
        last = p.unsqueeze(1) - torch.eye(10, dtype=p.dtype)  # [N, label, C]
        first = (last @ model[2].weight) * (1 - hidden.square()).unsqueeze(1)
        t = last.square().sum(-1) * (hidden.square().sum(1, keepdim=True) + 1)
        t += first.square().sum(-1) * (x.square().sum(1, keepdim=True) + 1)
        mean = (p * t).sum(1)
        variance = (p * t.square()).sum(1) - mean.square()
    return float(mean.mean()), float(variance.sum() / samples) ** 0.5 / len(x)


@pytest.mark.parametrize("name", ["diag", "ekfac"])
def test_five_sampled_labels_give_the_trace_within_a_tenth(snapshots, batch, name):
    """Corrected for step 1000; steps 0 and 50 are as the card says.

    The card asks for 10% of the exact trace at 5 labels an example, and names no step. That holds early: the standard
    deviation, known in closed form, is 0.3 to 3% at steps 0 and 50. At step 1000 the network is sure of nearly every
    example, the trace rests on few improbable labels, and the standard deviation is 13%: of 40 seeds 18 (network 0)
    and 22 (network 1) lie within 10%, as they should. There the test asks for 4 standard deviations instead, and the
    next test shows that the mean is right.
    """
    for step, measured in snapshots.items():
        exact, deviation = _sampled_trace(measured.model, batch[0], samples=5)
        sampled = lw.fisher(measured.model, batch, structure=name, estimator="sampled", samples=5, seed=0)
        assert float(measured.matrices["dense"].trace()) == pytest.approx(exact, rel=1e-10)
        assert float(sampled.trace()) == pytest.approx(exact, abs=4 * deviation)
        if step < 1000:
            assert float(sampled.trace()) == pytest.approx(exact, rel=0.1)
        else:
            assert 0.1 < deviation / exact < 0.2  # why 10% cannot be asked for


def test_sampled_traces_are_right_in_the_mean_at_the_end_of_training(snapshots, batch):
    """40 seeds of 5 labels: the standard deviation of the mean is 13% / √40 = 2%."""
    model = snapshots[1000].model
    exact, deviation = _sampled_trace(model, batch[0], samples=5)
    draws = [
        float(lw.fisher(model, batch, structure="diag", estimator="sampled", samples=5, seed=seed).trace())
        for seed in range(40)
    ]
    assert sum(draws) / 40 == pytest.approx(exact, abs=4 * deviation / 40**0.5)


@pytest.mark.parametrize(("step", "name", "value"), [
    (0, "diag", 0.877), (0, "block", 0.640), (0, "kfac exact", 0.649), (0, "ekfac", 0.649),
    (50, "diag", 0.955), (50, "kfac exact", 0.835), (50, "ekfac", 0.820),
    (1000, "diag", 0.973), (1000, "kfac exact", 0.874), (1000, "ekfac", 0.854),
])  # fmt: skip
def test_frobenius_errors_are_those_of_the_reference_table(snapshots, step, name, value):
    assert snapshots[step].rows[name].frobenius == pytest.approx(value, abs=0.05)


# --- G2: one code for all structures ---------------------------------------------------------------------

ALL = ("dense", "block", "diag", "quasidiag", "kfac", "ekfac", "lowrank", "implicit")


def _quad(model: nn.Module, batch: tuple[Tensor, Tensor], structure: str, v: lw.ParamVector) -> Tensor:
    """What a user writes; nothing here depends on the structure."""
    return lw.fisher(model, batch, structure=structure, estimator="exact").quad(v)


def test_dense_implicit_and_low_rank_are_one_matrix(snapshots, batch):
    v = lw.ParamVector.randn(snapshots[0].model, generator=0)
    for measured in snapshots.values():
        dense = float(measured.matrices["dense"].quad(v))
        for structure in ("implicit", "lowrank"):
            assert float(_quad(measured.model, batch, structure, v)) == pytest.approx(dense, rel=1e-9)


@pytest.mark.parametrize("structure", ALL)
def test_every_structure_answers_and_leaves_the_model_alone(snapshots, batch, structure):
    model, (x, y) = snapshots[50].model, batch
    v = lw.ParamVector.randn(model, generator=0)
    before = {k: t.clone() for k, t in model.state_dict().items()}
    draws, mode = torch.get_rng_state(), [m.training for m in model.modules()]
    value = _quad(model, (x[:50], y[:50]), structure, v)
    assert value.shape == ()
    assert float(value) > 0
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), draws)
    assert [m.training for m in model.modules()] == mode
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
