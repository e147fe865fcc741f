"""EKFAC's squares for examples on a GPU: every order, stacked and alone, and without hidden copies."""

import pytest
import torch

from layerwise.optim.cuda import contraction_orders as example_orders
from layerwise.optim.cuda.contraction_orders import ORDERS, Order, Sizes
from layerwise.optim.cuda.per_example_squares import squares_of_stack
from linear_records import bases, exact_squares, linear_records

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA; run `make test-gpu` on a GPU"),
]
EXAMPLES = 4
SHAPES = {  # s, p, q
    Order(left=True, right=True): (64, 256, 384),
    Order(left=False, right=True): (512, 768, 256),
    Order(left=True, right=False): (512, 256, 768),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_is_accurate(order: Order, bias: bool, monkeypatch: pytest.MonkeyPatch):
    """With bases in float16 as they are kept, padded to 16 columns where there is a bias."""
    s, p, q = SHAPES[order]
    I = q + 16 if bias else q
    assert Sizes(s, p, p, q, I, bias).order == order
    records = linear_records(2, EXAMPLES, s, p, q, bias, device="cuda")
    U_P, U_Q = bases(2, p, p), bases(2, q + bias, I)
    exact = exact_squares(records, U_P, U_Q)
    scale = torch.full((2,), 64.0, device="cuda")
    P, Q = (((64 * U).half().cuda(), scale) for U in (U_P, U_Q))
    for alone in (2**60, 0):
        monkeypatch.setattr(example_orders, "ALONE", alone)
        found = squares_of_stack(records, P, Q).double().cpu()
        assert float((found - exact).norm() / exact.norm()) < 1e-2


@pytest.mark.parametrize("order", ORDERS)
def test_no_product_copies_what_it_is_given(order: Order, monkeypatch: pytest.MonkeyPatch):
    """Strides of views go to cuBLAS as they are: beside bases and results there are rows and two sets of gradients."""
    monkeypatch.setattr(example_orders, "ALONE", 0)
    s, p, q = SHAPES[order]
    examples, I = 128, q + 16
    records = linear_records(1, examples, s, p, q, bias=True, device="cuda")
    P, Q = ((bases(1, own, width).cuda(), torch.ones(1, device="cuda")) for own, width in ((p, p), (q + 1, I)))
    squares_of_stack(records, P, Q)  # makes cuBLAS's workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    squares_of_stack(records, P, Q)
    kept = 2 * (p * p + I * I) + 4 * p * I + 2 * examples * s * (p * order.left + I * order.right)
    gradients = 2 * examples * p * I * (1 if all(order) else 2)
    workspace = 2**25  # cuBLASLt's, before there are gradients
    assert torch.cuda.max_memory_allocated() - before < 1.1 * (kept + max(gradients, workspace))
