"""`make_plan`: within the memory, never dearer than one order for all, and it says what it does."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_tools import gaussian, mlp, refused
from torch import nn

import layerwise as lw
from layerwise.foundations.errors import InputError, MemoryBudgetError, NameLookupError
from layerwise.kernel.contraction import ORDERS
from layerwise.kernel.cost import LayerSizes, cost
from layerwise.kernel.plan import Plan, Request, make_plan
from layerwise.layers.table import LayerTable

SPECS = LayerTable.from_model(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))).layers
CPU = torch.device("cpu")
QUICKLY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


LAYER = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["plain", "plain", "tokens", "bare"]),
        "S": st.sampled_from([1, 4, 49, 256]),
        "K": st.sampled_from([1, 3]),
        "O": st.integers(1, 200),
        "I": st.integers(1, 300),
    }
)
LAYERS, FUNCTIONS, EXAMPLES = st.lists(LAYER, min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 60)
MEMORY = st.integers(10**4, 10**8)


def _sizes(kind: str, S: int, K: int, O: int, I: int, P: int) -> LayerSizes:
    if kind == "bare":
        return LayerSizes(1, K, O, I, P, raw=P * K * O * I, bare=True)
    if kind == "tokens":
        return LayerSizes(S, 1, O, 1, P, raw=S + P * S * O, tokens=17 * I)
    return LayerSizes(S, K, O, I, P, raw=S * K * (I + P * O))


def _request(layers: list[dict], P: int, n: int, m: int | None, memory: int) -> Request:
    sizes = [_sizes(**layer, P=P) for layer in layers]
    graph = 4 * sum(one.raw for one in sizes)
    chosen = tuple(zip(SPECS, sizes, strict=False))
    return Request(chosen, n, m, P, float(graph), graph // P, torch.float32, CPU, memory)


def _scratch(order: str, sizes: LayerSizes, b: int, V: int) -> int:
    """Numbers of the largest tensor that a tile of b × b examples and V × V cotangents makes."""
    S, K, O = sizes.positions, sizes.groups, sizes.outputs
    if order == "gram":
        return b * b * K * S * S * V * V
    return b * b * K * S * V * O if order in ("chain", "product") else 0


@pytest.mark.usefixtures("untyped")
@QUICKLY
@given(layers=LAYERS, P=FUNCTIONS, n=EXAMPLES, m=st.none() | EXAMPLES, memory=MEMORY)
def test_a_plan_keeps_to_the_memory(layers: list[dict], P: int, n: int, m: int | None, memory: int):
    request = _request(layers, P, n, m, memory)
    try:
        plan = make_plan(request)
    except MemoryBudgetError as refusal:
        _check_refusal(request, refusal)
        return
    free = request.memory - request.matrix_bytes
    assert plan.kept_bytes <= free
    groups = plan.groups
    assert 1 <= plan.block <= max(groups)
    assert 1 <= plan.cotangents <= request.functions
    assert groups[0] <= request.n
    assert groups[1] <= (request.n if request.m is None else request.m)
    assert [layer.spec.name for layer in plan.layers] == [spec.name for spec, _ in request.layers]
    for layer in plan.layers:
        tile = layer.cost.tile
        assert layer.keeps_rows == (tile == 0)
        smallest = tile <= 1 and layer.cost.vector_tile == 1
        needed = _scratch(layer.order, layer.sizes, tile, layer.cost.vector_tile) * request.dtype.itemsize
        assert smallest or needed <= free // 8


def _check_refusal(request: Request, refusal: MemoryBudgetError) -> None:
    """The memory that it asks for is enough, or the matrix alone is too large."""
    if "two single examples" not in str(refusal):
        assert request.matrix_bytes > request.memory
        return
    needed = int(str(refusal).split("Allow memory=")[1].split(",")[0])
    assert needed > request.memory
    assert make_plan(replace(request, memory=needed)).kept_bytes <= needed


@pytest.mark.usefixtures("untyped")
@QUICKLY
@given(layers=LAYERS, P=FUNCTIONS, n=EXAMPLES, m=st.none() | EXAMPLES)
def test_counting_never_costs_more_than_one_order_for_all(layers: list[dict], P: int, n: int, m: int | None):
    request = _request(layers, P, n, m, memory=2**50)
    plan = make_plan(request)
    assert plan.tiles == 1
    for order in ORDERS:
        assert plan.multiply_adds <= make_plan(replace(request, algorithm=order)).multiply_adds * (1 + 1e-12)


@pytest.mark.usefixtures("untyped")
@QUICKLY
@given(layers=LAYERS, P=FUNCTIONS, n=EXAMPLES, m=st.none() | EXAMPLES, memory=MEMORY)
def test_tiles_cover_all_pairs(layers: list[dict], P: int, n: int, m: int | None, memory: int):
    request = _request(layers, P, n, m, memory)
    try:
        plan = make_plan(request)
    except MemoryBudgetError:
        return
    first = -(-request.n // plan.groups[0])
    second = first if request.m is None else -(-request.m // plan.groups[1])
    assert plan.tiles == (first * (first + 1) // 2 if request.m is None else first * second)
    assert ("tiled" in str(plan)) == (plan.tiles > 1)
    assert plan.recorded >= request.n + (request.m or 0)


# --- counts -------------------------------------------------------------------------------------------------


def test_multiply_adds_are_those_of_the_contraction():
    """The formulas of the table in `contraction`, without traffic: per pair and group."""
    S, K, O, I, V, n = 6, 2, 5, 7, 3, 4
    sizes, pairs = LayerSizes(S, K, O, I, V, raw=1), n * (n + 1) / 2
    counts = {order: cost(order, sizes, n, n, pairs, 10**9, 0.0, False).multiply_adds for order in ORDERS}
    making = V * S * K * O * I
    assert counts["gram"] == pairs * K * S * S * (I + V * V * O)
    assert counts["chain"] == pairs * K * (S * S * (I + V * O) + S * V * V * O)
    assert counts["product"] == pairs * (K * (S * V * O * I + S * V * V * O) + making / n)
    kept = cost("rows", sizes, n, n, pairs, 10**9, 0.0, True)
    assert kept.multiply_adds == pairs * V * V * K * O * I + n * making
    assert kept.kept == V * K * O * I


def test_a_linear_layer_takes_the_product_of_two_gram_matrices():
    plan = lw.ntk(mlp(20, 30, 3), gaussian(16, 20)).plan()
    assert [layer.order for layer in plan.layers] == ["gram", "gram"]


def test_an_early_convolution_takes_per_example_gradients():
    """1024 positions and 27 inputs: pairs of positions would cost far more."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    plan = lw.ntk(model, torch.randn(8, 3, 32, 32)).plan()
    assert plan.by_name["0"].order == "rows"


def test_the_plan_prints_what_it_will_do():
    plan: Plan = lw.ntk(mlp(3, 4, 2), gaussian(5, 3)).plan()
    text = str(plan)
    assert "matrix 10 × 10 (800 B, one half computed)" in text
    assert f"{plan.multiply_adds:.2e} multiply-adds" in text
    assert "1 × 4 × 4" in text
    assert "examples recorded at a time: 5, with 2 of 2 cotangents" in text
    assert "one half" not in str(lw.ntk(mlp(3, 4, 2), gaussian(5, 3), gaussian(2, 3)).plan())


def test_a_tiled_plan_of_two_sets_is_printed():
    """With annotations checked."""
    K = lw.ntk(mlp(3, 4, 2), gaussian(8, 3), gaussian(9, 3), memory=6_000)
    assert K.plan().tiles > 1
    assert "tiled: " in str(K.plan())


def test_making_a_plan_computes_no_kernel():
    K = lw.ntk(mlp(3, 4, 2), gaussian(5, 3))
    assert K.plan() is K.plan()
    assert not K.has_matrix()


@pytest.mark.parametrize("algorithm", ["gramm", {"0": "grm"}, {"*": "row"}])
def test_an_order_that_does_not_exist(algorithm: str | dict[str, str]):
    with refused(InputError, "algorithm=", "auto, chain, gram, product, rows", "Did you mean"):
        lw.ntk(mlp(3, 4, 2), gaussian(5, 3), algorithm=algorithm)


def test_an_order_for_layers_that_do_not_exist():
    with refused(NameLookupError, "'conv*'", "Unknown layer"):
        lw.ntk(mlp(3, 4, 2), gaussian(5, 3), algorithm={"0": "gram", "conv*": "rows"})
