"""Kernels and optimizers on a GPU: the same numbers as on the CPU."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import layerwise as lw
from layerwise.testing import case, oracles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run `make test-gpu` on one"),
]
CASES = ["mlp", "conv2d", "embedding", "lstm", "layer_norm", "batch_norm2d", "attention"]


def _cuda(tree):
    return tree.cuda() if isinstance(tree, torch.Tensor) else tree


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("algorithm", ["auto", "gram", "chain", "product", "rows"])
def test_kernel_equals_the_oracle(name: str, algorithm: str):
    model, x, _ = case(name).make()
    expected = oracles.ntk(model, x)
    K = lw.ntk(copy.deepcopy(model).cuda(), _cuda(x), algorithm=algorithm)
    assert torch.allclose(K.matrix().cpu(), expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))
    u = torch.randn(K.shape[1], dtype=torch.float64)
    found = lw.ntk(copy.deepcopy(model).cuda(), _cuda(x)) @ u.cuda()
    assert torch.allclose(found.cpu(), expected @ u, rtol=1e-8, atol=1e-8 * float((expected @ u).abs().max()))


def test_float32_convolutions_do_not_use_tf32():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(128, 4)).cuda()
    x = torch.randn(12, 3, 8, 8, device="cuda")
    before = torch.backends.cudnn.allow_tf32
    K = lw.ntk(model, x).matrix().double()
    exact = lw.ntk(copy.deepcopy(model).double(), x.double()).matrix()
    assert float((K - exact).norm() / exact.norm()) < 1e-5
    assert torch.backends.cudnn.allow_tf32 == before


def test_tiles_under_small_memory():
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 5)).cuda().double()
    x = torch.randn(40, 32, device="cuda", dtype=torch.float64)
    whole = lw.ntk(model, x)
    K = lw.ntk(model, x, memory=whole.plan().request.matrix_bytes + 100_000, algorithm="rows")
    assert K.plan().tiles > 1
    assert torch.allclose(K.matrix(), whole.matrix(), rtol=1e-10, atol=1e-10)


def _last_token(tokens: int) -> nn.Module:
    """Logits that follow the last position: most layers have a gradient at one position alone."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.norm = nn.Embedding(tokens, 8), nn.LayerNorm(8)
            self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.tokens(x)
            h = h + self.norm(h).cumsum(1)
            return self.head((h + self.mix(h).tanh())[:, -1])

    torch.manual_seed(0)
    return Model().double()


def _images() -> nn.Module:
    torch.manual_seed(0)
    body = (nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(64, 5)).double().eval()


MODELS = {
    "images": (_images, lambda: torch.randn(40, 3, 8, 8, dtype=torch.float64)),
    "few tokens": (lambda: _last_token(7), lambda: torch.randint(7, (40, 6))),
    "many tokens": (lambda: _last_token(5000), lambda: torch.randint(5000, (40, 6))),
}


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("algorithm", ["auto", "gram", "chain", "product", "rows"])
def test_norms_and_tokens_equal_the_cpu(name: str, algorithm: str):
    make, data = MODELS[name]
    model, x = make(), data()
    expected = lw.ntk(model, x).matrix()
    found = lw.ntk(copy.deepcopy(model).cuda(), x.cuda(), algorithm=algorithm).matrix().cpu()
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize("name", list(MODELS))
def test_a_kernel_is_computed_without_stopping_the_stream(name: str, request: pytest.FixtureRequest):
    """The host reads a few numbers at marks of the stream; it never waits for all that is queued."""
    make, data = MODELS[name]
    model, x = make().cuda(), data().cuda()
    expected = lw.ntk(model, x).matrix()  # the model is looked at once
    request.getfixturevalue("no_synchronisation")
    found = lw.ntk(model, x).matrix()
    torch.cuda.set_sync_debug_mode("default")
    assert torch.allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("name", list(MODELS))
def test_launches_do_not_grow_with_the_outputs(name: str):
    make, data = MODELS[name]
    launches = []
    for outputs in ([0, 1], [0, 1, 2, 3, 4]):
        model, x = make().cuda(), data().cuda()
        lw.ntk(model, x, outputs=outputs).matrix()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            lw.ntk(model, x, outputs=outputs).matrix()
            torch.cuda.synchronize()
        launches.append(sum(e.device_type.name == "CUDA" for e in profile.events() or []))
    assert launches[1] <= 1.1 * launches[0] + 5  # libraries cut a product in other ways


@pytest.mark.parametrize("name", ["KFAC", "EKFAC", "FOOF", "NGD", "Shampoo", "SOAP", "Muon", "Adam", "SGD"])
def test_optimizers_take_the_same_steps_as_on_the_cpu(name: str):
    options: dict[str, Any] = {}
    if name == "Muon":
        options = {"orthogonalize": "polar"}  # Newton–Schulz in fp16 rounds differently
    if name in ("KFAC", "EKFAC", "NGD"):
        options = {"likelihood": "categorical", "estimator": "exact"}
    if name in ("KFAC", "EKFAC", "FOOF", "Shampoo", "SOAP"):
        options["refresh_every"] = 1  # else layers take turns, on a GPU in another order
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(32, 6, dtype=torch.float64), torch.randint(3, (32,))
    ends = []
    for device in ("cpu", "cuda"):
        net = copy.deepcopy(model).to(device)
        opt = getattr(lw.optim, name)(net, **options, scale="formula")
        steps = 1 if name == "SOAP" else 8  # later its basis is a matter of rounding
        for _ in range(steps):
            opt.zero_grad()
            nn.functional.cross_entropy(net(x.to(device)), y.to(device)).backward()
            opt.step()
        ends.append(torch.cat([p.detach().flatten().cpu() for p in net.parameters()]))
    assert torch.allclose(ends[0], ends[1], rtol=1e-6, atol=1e-8)
