"""Tiles of every kind give one matrix: groups of examples, blocks, cotangents, tiles of a contraction."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_tools import close, convnet, gaussian, refused, relative
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.errors import MemoryBudgetError
from layerwise.kernel.assemble import WHOLE, assemble
from layerwise.kernel.contraction import ORDERS
from layerwise.layers.io.layer_io import RecordedIO
from layerwise.testing import oracles

pytestmark = pytest.mark.usefixtures("untyped")
N = 8
BUDGETS = (24_000, 40_000, 60_000, 80_000, 200_000)
"""From single examples, rows traded for a and g, to one group."""


@pytest.fixture(scope="module")
def images() -> tuple[nn.Module, Tensor, Tensor]:
    model, x = convnet(), gaussian(N, 2, 6, 6)
    return model, x, oracles.ntk(model, x)


@pytest.mark.parametrize("memory", BUDGETS)
def test_small_memory_gives_the_same_matrix(images: tuple, memory: int):
    model, x, expected = images
    K = lw.ntk(model, x, memory=memory)
    close(K.matrix(), expected)
    assert torch.equal(K.matrix(), K.matrix().mT)
    plan = K.plan()
    assert plan.kept_bytes + plan.request.matrix_bytes <= memory
    assert ("tiled" in str(plan)) == (plan.tiles > 1) == (memory < 200_000)


def test_the_budgets_force_every_kind_of_tile(images: tuple):
    model, x, _ = images
    plans = [lw.ntk(model, x, memory=memory).plan() for memory in BUDGETS]
    assert [plan.tiles for plan in plans] == sorted((plan.tiles for plan in plans), reverse=True)
    assert {1, 36} <= {plan.tiles for plan in plans}  # one group; groups of one example
    assert any(layer.order == "rows" and not layer.keeps_rows for layer in plans[0].layers)  # rows traded for a, g
    assert plans[-1].layers[1].keeps_rows
    assert {plan.cotangents for plan in plans} >= {1, 2, 3}


@pytest.mark.parametrize("memory", [24_000, 40_000, 100_000])
@pytest.mark.parametrize("split", [3, 1, 7])
def test_cross_kernels_are_tiled_too(images: tuple, memory: int, split: int):
    model, x, expected = images
    K = lw.ntk(model, x[:split], x[split:], memory=memory)
    close(K.matrix(), expected[: 3 * split, 3 * split :])
    assert K.plan().kept_bytes <= memory
    assert K.plan().tiles > 1 or memory == 100_000
    assert ("tiled" in str(K.plan())) == (K.plan().tiles > 1)


@pytest.mark.parametrize("algorithm", list(ORDERS))
def test_small_memory_for_every_order(images: tuple, algorithm: str):
    model, x, expected = images
    K = lw.ntk(model, x, memory=60_000, algorithm=algorithm)
    assert K.plan().tiles > 1
    close(K.matrix(), expected)
    parts = lw.ntk(model, x, memory=70_000, algorithm=algorithm).per_layer()
    close(sum(part.matrix() for part in parts.values()), expected)


def test_tiles_of_cotangents():
    """Sequences of 24 functions: too many for one tile."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), gaussian(4, 8, 3)
    for algorithm in ORDERS:
        K = lw.ntk(model, x, memory=250_000, algorithm=algorithm)
        step = {layer.cost.vector_tile for layer in K.plan().layers if layer.cost.tile}
        assert algorithm == "rows" or min(step) < 24, K.plan()
        close(K.matrix(), oracles.ntk(model, x))


@pytest.mark.parametrize("memory", [235_000, 240_000, 280_000, 310_000])
def test_no_more_examples_are_recorded_than_the_plan_says(memory: int):
    """Also where blocks do not divide groups."""
    model, x, seen = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double(), gaussian(23, 6, 8), []
    K = lw.ntk(model, x, memory=memory)
    promised = K.plan().recorded
    model.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    K.matrix()
    assert sum(seen) <= promised, str(K.plan())


def test_one_group_records_every_example_once(images: tuple):
    model, x, _ = images
    K, seen = lw.ntk(model, x), []
    handle = model.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    K.matrix()
    handle.remove()
    assert sum(seen) == N == K.plan().recorded


# --- any plan at all ----------------------------------------------------------------------------------------


def _tokens() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 3, padding_idx=0), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return net, torch.randint(9, (5, 4), generator=torch.Generator().manual_seed(0))


MODELS = {"images": (convnet(), gaussian(5, 2, 6, 6)), "tokens": _tokens()}


@cache
def _expected(name: str) -> Tensor:
    return oracles.ntk(*MODELS[name])


def _planned(K: Any, draw: Any) -> Any:
    """A plan with anything in it, as long as it is a plan."""
    P, plan = K.functions, K.plan()
    layers = []
    for layer in plan.layers:
        order = draw(st.sampled_from(sorted(ORDERS)))
        keeps = order == "rows" and not layer.sizes.tokens and draw(st.booleans())
        cost = replace(
            layer.cost, tile=0 if keeps else draw(st.integers(1, 5)), vector_tile=draw(st.integers(1, min(P, 8)))
        )
        layers.append(replace(layer, order=order, keeps_rows=keeps, cost=cost))
    groups = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return replace(
        plan, layers=tuple(layers), block=draw(st.integers(1, 5)), cotangents=draw(st.integers(1, P)), groups=groups
    )


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(sorted(MODELS)), split=st.sampled_from([None, 1, 3]))
def test_any_plan_gives_the_same_matrix(data: st.DataObject, name: str, split: int | None):
    (model, x), expected = MODELS[name], _expected(name)
    K = lw.ntk(model, x) if split is None else lw.ntk(model, x[:split], x[split:])
    plan = _planned(K, data.draw)
    second = None if K.second is None else K.second.examples
    for examples in (K.first.examples, second):
        if examples is not None:
            examples.cut(plan.block)
    found = assemble(K.first.recorder, K.first.examples, second, K.first.outputs, plan, K.first.progress)[WHOLE]
    P = K.functions
    part = expected if split is None else expected[: split * P, split * P :]
    assert relative(found, part) <= 1e-10


# --- refusals -----------------------------------------------------------------------------------------------


def test_a_matrix_that_does_not_fit_is_refused_with_its_size(images: tuple):
    model, x, expected = images
    K = lw.ntk(model, x, memory=4_600)
    with refused(MemoryBudgetError, "4.5 KiB", "memory=4600", "K @ u", "K.solve(y, ridge)"):
        K.matrix()
    with refused(MemoryBudgetError, "4.5 KiB"):
        K.plan()
    close(K @ gaussian(24), expected @ gaussian(24))
    close(K.diag(), expected.diagonal())
    with refused(MemoryBudgetError, "a kernel for each layer", "13.5 KiB"):
        lw.ntk(model, x, memory=13_000).per_layer()


def test_a_dense_jacobian_that_does_not_fit_is_refused_with_its_size(images: tuple):
    model, x, _ = images
    J = lw.jacobian(model, x, memory=40_000)
    rows, d = J.shape
    with refused(MemoryBudgetError, f"{rows} × {d}", f"{2 * rows * d * 8 / 1024:.1f} KiB", "J.blocks()"):
        J.to_dense()
    assert sum(len(block) for block in J.blocks()) == rows


@pytest.mark.parametrize("split", [None, 3])
def test_layers_that_do_not_fit_are_refused_and_the_memory_named_suffices(images: tuple, split: int | None):
    model, x, expected = images
    inputs = (x,) if split is None else (x[:split], x[split:])
    with pytest.raises(MemoryBudgetError) as caught:
        lw.ntk(model, *inputs, memory=12_000).matrix()
    assert "two single examples" in str(caught.value)
    needed = int(str(caught.value).split("Allow memory=")[1].split(",")[0])
    found = lw.ntk(model, *inputs, memory=needed).matrix()
    close(found, expected if split is None else expected[: 3 * split, 3 * split :])


def test_a_tile_that_cannot_be_small_enough_is_refused_or_avoided():
    """4096 positions: one pair of examples has a Gram matrix of 128 MiB in float32, and another of that size."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    x, memory = torch.randn(4, 4, 64, 64), 32 * 2**20
    assert lw.ntk(model, x, memory=memory).plan().layers[0].order in ("rows", "product")
    with refused(MemoryBudgetError, "memory="):
        lw.ntk(model, x, memory=memory, algorithm="gram").plan()


@pytest.mark.parametrize("n", [8, 40])
def test_no_tile_is_made_in_vain(n: int, monkeypatch: pytest.MonkeyPatch):
    """Of a square kernel the upper half, and a tile against itself is made once: an unfolded convolution is large."""
    model, x, made = nn.Linear(5, 2).double(), gaussian(n, 3, 5), []
    lw.ntk(model, x, algorithm="gram").matrix()  # what is recorded of the model is verified once, with tiles of its own
    K, standard = lw.ntk(model, x, algorithm="gram"), RecordedIO.standard
    tiles = -(-n // K.plan().layers[0].cost.tile)
    assert tiles == (1 if n == 8 else 4)
    monkeypatch.setattr(RecordedIO, "standard", lambda io: made.append(io.examples) or standard(io))
    close(K.matrix(), oracles.ntk(model, x))
    assert len(made) == tiles + tiles * (tiles - 1) // 2
