"""Running means of second moments by Triton's kernels on a GPU, against float64."""

import pytest
import torch
from torch import Tensor

from layerwise.optim.cuda.device_step import DeviceStep
from layerwise.optim.cuda.rows import Rows, _average_by_torch_, average_rows_, together
from layerwise.optim.cuda.triton import products as triton_products
from layerwise.optim.cuda.triton.columns import average_grams_
from layerwise.optim.reference import running_weight
from layerwise.optim.rule import Context
from random_tensors import cuda_randn as randn
from waiting import nothing_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and triton_products.available(torch.device("cuda"))),
        reason="needs triton and a GPU of capability 8.0; run `make test-gpu` on one",
    ),
]


def moment(X: Tensor, border: bool) -> Tensor:
    rows = X.double()
    rows = torch.cat([rows, torch.ones_like(rows[:, :1])], 1) if border else rows
    return rows.mT @ rows / len(X)


@pytest.mark.parametrize("border", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "K", "kind"),
    [
        (8192, 768, 12, torch.bfloat16),
        (8192, 768, 3, torch.float32),
        (8192, 3072, 2, torch.bfloat16),
        (1000, 48, 5, torch.float16),
        (77, 16, 1, torch.bfloat16),
        (300, 64, 40, torch.float32),
    ],
)
def test_means(m: int, n: int, K: int, kind: torch.dtype, border: bool):
    X = [randn(m, n, seed=k).to(kind) for k in range(K)]
    N = n + 16 * border
    mean, count = torch.zeros(K, N, N, device="cuda"), torch.zeros(K, device="cuda")
    seen = []
    for _ in range(2):
        mean.zero_()
        count.zero_()
        skipped = average_grams_(mean, count, X, 1 / m, 0.95, border=border)
        assert int(skipped) == 0
        seen.append(mean.clone())
    assert torch.equal(*seen)  # the same numbers every time
    here = n + border
    for k, x in enumerate(X):
        expected = moment(x.bfloat16() if kind == torch.float32 else x, border)
        torch.testing.assert_close(mean[k, :here, :here].double(), expected, rtol=1e-4, atol=1e-4)
    assert not mean[:, here:].any()
    assert count.tolist() == [1] * K


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e20])
def test_one_layer_is_left_out(bad: float):
    X = [randn(2048, 768, seed=k).bfloat16() for k in range(4)]
    X[2][100:101, 300:301].fill_(bad)  # 1e20: its square is infinite
    mean = torch.ones(4, 784, 784, device="cuda")
    count = torch.full((4,), 3.0, device="cuda")
    all_finite = torch.ones((), dtype=torch.bool, device="cuda")
    with nothing_waits():
        skipped = average_grams_(mean, count, X, 1 / 2048, 0.9, all_finite=all_finite, border=True)
    assert int(skipped) == 1
    assert count.tolist() == [4, 4, 3, 4]
    assert (mean[2] == 1).all()
    assert torch.isfinite(mean).all()
    before = mean.clone()
    assert int(average_grams_(mean, count, X, 1 / 2048, 0.9, all_finite=~all_finite, border=True)) == 0
    assert torch.equal(mean, before)


@pytest.mark.parametrize("decay", [0.0, 0.95, 0.9999])
def test_weights(decay: float):
    X = [torch.ones(64, 16, dtype=torch.bfloat16, device="cuda")] * 3
    mean, count = torch.zeros(3, 32, 32, device="cuda"), torch.tensor([0.0, 1.0, 1e5], device="cuda")
    average_grams_(mean, count, X, 1 / 64, decay, border=True)
    weight = running_weight(count, decay)
    for found in (mean[:, 16, 16], mean[:, 16, 3], mean[:, 3, 16], mean[:, 3, 3]):
        torch.testing.assert_close(found.double(), weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bias", [False, True])
def test_the_same_as_torch(bias: bool):
    layers = [Rows(randn(8, 128, 256, seed=k), torch.bfloat16, 1.0, bias) for k in range(6)]
    rows = together(layers, [1024] * 6)
    assert rows is not None
    means = [torch.zeros(6, 272, 272, device="cuda") for _ in range(2)]
    counts = [torch.zeros(6, device="cuda") for _ in range(2)]
    step = DeviceStep(torch.ones((), dtype=torch.bool, device="cuda"))
    for average, mean, count in zip((average_rows_, _average_by_torch_), means, counts, strict=True):
        for _ in range(3):
            average(mean, count, rows, 0.9, Context(1, 0.0, 0.0, True, {}, device_step=step))
    assert torch.equal(*counts)
    torch.testing.assert_close(*means, rtol=1e-4, atol=1e-4)
