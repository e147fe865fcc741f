"""Orders of EKFAC's products for examples: all give the same, and the one with the fewest multiply-adds is taken."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from counting import Operations
from layerwise.optim.cuda import contraction_orders as example_orders
from layerwise.optim.cuda.contraction_orders import ORDERS, Order, Sizes
from layerwise.optim.cuda.per_example_squares import alike, squares_of_rows, squares_of_stack
from layerwise.optim.rule import Recorded
from linear_records import bases, exact_squares, linear_records

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16: torch goes on
EXAMPLES = 3
SHAPES = {  # s, p, q
    Order(left=True, right=True): (5, 16, 32),
    Order(left=False, right=True): (22, 80, 16),
    Order(left=True, right=False): (28, 16, 80),
}
Pair = tuple[Tensor, Tensor]


def asked(
    layers: int, s: int, p: int, q: int, bias: bool, wider: int = 0, **options: Any
) -> tuple[list[list[Recorded]], Pair, Pair]:
    """What `squares_of_stack` is given."""
    records = linear_records(layers, EXAMPLES, s, p, q, bias, **options)
    assert alike(records)
    U_P, U_Q = bases(layers, p, p + wider), bases(layers, q + bias, q + bias + wider)
    return records, (2 * U_P, torch.full((layers,), 2.0)), (U_Q, torch.ones(layers))


def squares(*shape: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Found, and exact."""
    records, P, Q = asked(*shape, **options)
    return squares_of_stack(records, P, Q), exact_squares(records, P[0] / 2, Q[0])


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_is_accurate(order: Order, bias: bool, monkeypatch: pytest.MonkeyPatch):
    """One layer and several, these stacked or each by itself, all examples or one at a time, and wider bases."""
    s, p, q = SHAPES[order]
    for layers, wider in ((1, 2), (2, 0), (3, 2)):
        assert Sizes(s, p, p + wider, q, q + bias + wider, bias).order == order
        found, exact = squares(layers, s, p, q, bias, wider)
        assert found.shape == exact.shape
        assert found.is_contiguous()
        assert error(found, exact) < 1e-2
        for name, value in (("ALONE", 0), ("MOST_BYTES", 1)):  # each by itself; then one example
            monkeypatch.setattr(example_orders, name, value)
            assert error(squares(layers, s, p, q, bias, wider)[0], exact) < 1e-2
        monkeypatch.undo()
        assert not found[:, p:].any()
        assert not found[:, :, q + bias :].any()


@pytest.mark.parametrize("bias", [True, False])
def test_one_position(bias: bool):
    """Squares of an outer product are products of squares: no gradient of an example is made."""
    records, P, Q = asked(2, 1, 32, 48, bias, wider=3)
    with Operations() as made:
        found = squares_of_stack(records, P, Q)
    assert error(found, exact_squares(records, P[0] / 2, Q[0])) < 1e-2
    assert not made.seen["linalg_vector_norm"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "options",
    [{"x_dtype": torch.float32}, {"x_dtype": torch.float16}, {"axis": 1}, {"axis": 1, "x_dtype": torch.float32}],
)
def test_rows_as_they_come(order: Order, options: dict, monkeypatch: pytest.MonkeyPatch):
    """Single precision that autocast rounded, float16, positions before examples; stacked, alone, and by examples."""
    for name, value in (("ALONE", 2**60), ("ALONE", 0), ("MOST_BYTES", 1)):
        monkeypatch.setattr(example_orders, name, value)
        found, exact = squares(2, *SHAPES[order], bias=True, wider=0, **options)
        assert error(found, exact) < 1e-2


@pytest.mark.parametrize(("bias", "wider"), [(True, 0), (True, 5), (False, 0), (False, 16)])
@pytest.mark.parametrize("shape", [*SHAPES.values(), (32, 32, 32), (40, 48, 32), (48, 32, 48), (1, 16, 32)])
def test_the_order_is_the_cheapest(shape: tuple[int, int, int], bias: bool, wider: int):
    """As torch counts what is multiplied."""
    s, p, q = shape
    sizes = Sizes(s, p, p + wider, q, q + bias + wider, bias)
    counted = {}
    for order in ORDERS:
        g, a = (torch.zeros(1, 2, s, own, dtype=torch.bfloat16) for own in (p, q))
        U_P, U_Q = (torch.zeros(1, *size, dtype=torch.bfloat16) for size in ((p, sizes.O), (sizes.I, sizes.I)))
        with FlopCounterMode(display=False) as counter:
            squares_of_rows(g, a, U_P, U_Q, sizes, order, torch.zeros(1, sizes.O, sizes.I))
        counted[order] = counter.get_total_flops()
        assert counted[order] == 2 * 2 * sizes.work(order)
    with FlopCounterMode(display=False) as counter:
        squares_of_stack(*asked(3, s, p, q, bias, wider))
    assert counter.get_total_flops() * 2 == min(counted.values()) * 3 * EXAMPLES


@pytest.mark.parametrize("order", ORDERS)
def test_large_layers_are_not_copied(order: Order, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(example_orders, "ALONE", 0)
    s, p, q = SHAPES[order]
    for bias in {False, order.right}:
        given = asked(2, s, p, q, bias)
        with Operations() as made:
            squares_of_stack(*given)
        assert not {"clone", "copy_", "stack", "cat", "constant_pad_nd"} & made.seen.keys()
        assert made.seen["_to_copy"] == 2  # of a basis each


def test_which_layers_go_alone():
    """Those of a model of width 4096 with 8 sequences of 1024; not of width 768."""
    gpt, large = (
        [Sizes(1024, p, p, q, q + 16, bias=True) for p, q in ((3 * d, d), (d, d), (4 * d, d), (d, 4 * d))]
        for d in (768, 4096)
    )
    assert [tuple(sizes.order) for sizes in gpt] == [(False, True), (True, False), (False, True), (True, False)]
    for sizes in gpt:
        assert list(sizes.shares(2, 8)) == [slice(0, 2)]
        assert list(sizes.parts(8)) == [slice(0, 8)]
    for sizes in large:
        assert list(sizes.shares(2, 8)) == [slice(0, 1), slice(1, 2)]


def test_what_is_made_at_a_time_is_bounded(monkeypatch: pytest.MonkeyPatch):
    sizes = Sizes(5, 32, 32, 48, 49, bias=True)
    assert sizes.bytes == 4 * (5 * (32 + 49) + 32 * 49)
    monkeypatch.setattr(example_orders, "MOST_BYTES", 2 * 4 * sizes.bytes)
    assert list(sizes.shares(3, 4)) == [slice(0, 2), slice(2, 3)]
    assert list(sizes.shares(2, 9)) == [slice(0, 1), slice(1, 2)]
    assert list(sizes.parts(9)) == [slice(0, 8), slice(8, 9)]
