"""The sweep's iterations as CUDA graphs: the same as iterations that are made, without a word from the device."""

import collections
import dataclasses

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from layerwise import feature_learning as fl
from layerwise.optim.cuda.graphs import Graphs
from layerwise.studies.feature_learning import together
from layerwise.studies.feature_learning.batch import looked_up, shifted_out, solve_right
from layerwise.studies.feature_learning.by_products import largest_singular_value, orthonormal_by_products
from layerwise.studies.feature_learning.feed import Feed
from layerwise.studies.feature_learning.runs import Group, Runs, drawers
from layerwise.studies.feature_learning.two_layer import orthonormal_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run `make test-gpu` on one"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]
SMALL = fl.Setting(dx=16, dy=6, k=3, batch=128, scale="trace")
RECORDED = {n: dataclasses.replace(a, lr=[1e-3, 5e-3]) for n, a in fl.ALGORITHMS.items() if together.recordable(a)}
OTHERS = {"spectral": fl.Spectral(lr=[1e-3]), "batch norm": fl.AMGD(lr=[1e-3], norm="coord_batch")}
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")


def compare(algorithms, setting=SMALL, device="cuda"):
    return fl.compare(algorithms, setting=setting, steps=12, every=5, seeds=3, device=device)


def same(found, expected, digits):
    for name, result in expected.items():
        assert torch.equal(found[name].diverged_at, result.diverged_at)
        for field in ("loss", "population_loss", "dist", "transfer", "F", "G"):
            torch.testing.assert_close(getattr(found[name], field), getattr(result, field), rtol=digits, atol=digits)


@pytest.mark.parametrize("algorithms", [RECORDED, RECORDED | OTHERS], ids=["recorded", "others beside"])
def test_replayed_iterations_are_those_that_are_made(monkeypatch, algorithms):
    found = compare(algorithms)
    monkeypatch.setattr(together, "Graphs", lambda: Graphs(0))
    same(found, compare(algorithms), 1e-11)


def test_replayed_iterations_are_those_of_a_cpu():
    same(compare(RECORDED), compare(RECORDED, device="cpu"), 1e-7)


def test_a_recording_that_fails_is_done_without(monkeypatch):
    """An iteration that asks the device something cannot be recorded, and nothing of the attempt is left."""
    algorithms = {"sgd": fl.SGD(lr=[1e-3]), "kfac": fl.KFAC(lr=[1e-2, 1e-1]), "adam": fl.Adam(lr=[1e-3])}
    expected = compare(algorithms)
    direction, tried = fl.KFAC.direction, []

    def curious(self, F, G, batch):
        if torch.cuda.is_current_stream_capturing():
            tried.append(G.shape)
            float(G.sum())
        return direction(self, F, G, batch)

    monkeypatch.setattr(fl.KFAC, "direction", curious)
    same(compare(algorithms), expected, 1e-11)
    assert len(tried) == 1


@pytest.fixture
def iterations():
    """The whole sweep in small, after its first iterations, and how to go on."""
    group = Group(SMALL, range(3), "cuda", torch.float64)
    start = group.batch(0)
    runs = [Runs(algorithm, group, start) for algorithm in RECORDED.values()]
    with drawers(3) as pool:
        made = together.Iterations(runs, group, Feed(group, ("first", "second"), 40, pool))
        for t in range(1, 6):
            made.step(t)
        torch.cuda.synchronize()
        yield made


def test_steady_iterations_wait_for_nothing(iterations):
    torch.cuda.set_sync_debug_mode("error")
    try:
        for t in range(6, 20):
            iterations.step(t)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not iterations.batches.failed
    assert not iterations.moves.failed


def test_a_steady_iteration_is_two_launches_and_a_copy(iterations):
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for t in range(6, 16):
            iterations.step(t)
        torch.cuda.synchronize()
    calls = collections.Counter(event.name for event in profiled.events() or ())
    assert calls["cudaGraphLaunch"] == 20
    assert sum(calls[name] for name in LAUNCHES) == 20
    assert calls["cudaMemcpyAsync"] == 10
    assert calls["cudaStreamSynchronize"] == 0


def test_batched_linear_algebra_is_that_of_the_cpu():
    """Also beside members that are not finite, dependent, or not definite."""
    generator = torch.Generator().manual_seed(0)
    G = torch.randn(40, 8, 100, generator=generator, dtype=torch.float64)
    G *= torch.logspace(0, -5, 8, dtype=torch.float64)[:, None]
    G[1, 2, 3], G[2, 0, 0], G[3, 1], G[4] = torch.nan, torch.inf, G[3, 0], G[4] * 1e200
    found = orthonormal_by_products(G.cuda()).cpu()
    good = [0, *range(4, 40)]
    torch.testing.assert_close(found[good], orthonormal_rows(G[good]), rtol=0, atol=1e-11)
    assert found[[3, *good]].isfinite().all()
    assert not found[1].isfinite().all()
    assert not found[2].isfinite().all()

    good = [0, *range(5, 40)]
    S, A = G[good] @ G[good].mT, torch.randn(36, 15, 8, generator=generator, dtype=torch.float64)
    S[7, 0, 0] = -1.0
    solved, expected = solve_right(S.cuda(), A.cuda()).cpu(), solve_right(S, A)
    assert solved[7].isnan().all()
    assert expected[7].isnan().all()
    residual = (solved @ S - A)[[*range(7), *range(8, 36)]].abs().max()
    assert float(residual) < 1e-4  # a condition of 1e10, and numbers of 1e10 that cancel

    values = largest_singular_value(G[good].mT.cuda()).cpu()
    torch.testing.assert_close(values, torch.linalg.svdvals(G[good])[:, 0], rtol=1e-13, atol=0)
    octets = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(shifted_out(octets.cuda()).cpu(), looked_up(octets))
