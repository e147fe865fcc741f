"""Start-up on a GPU: what is compiled, when, and by which thread."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.optim.cuda import basis
from layerwise.optim.cuda.linalg.first_basis import iterated_once
from layerwise.optim.cuda.linalg.jacobi import coupling
from layerwise.optim.cuda.triton import ahead
from layerwise.optim.engine import Layerwise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
START_UP, STEPS = 10, 24
MEMBERS: dict[str, Callable[[nn.Module], Layerwise]] = {
    "Muon": lw.optim.Muon,
    "KFAC": lambda m: lw.optim.KFAC(m, estimator="empirical", factor_every=10),
    "KFAC, sampled": lambda m: lw.optim.KFAC(m, factor_every=10),
    "EKFAC": lambda m: lw.optim.EKFAC(m, scaling="running", factor_every=10),
    "Shampoo": lambda m: lw.optim.Shampoo(m, factor_every=10),
    "SOAP": lw.optim.SOAP,
}


@contextmanager
def compilations(triton: Any) -> Iterator[list[tuple[str, bool]]]:
    """Kernels that are compiled or loaded for a while, and whether by the main thread, which waits for that."""
    knobs, found = triton.knobs, list[tuple[str, bool]]()
    before = knobs.compilation.listener

    def listener(**event: Any) -> None:
        found.append((event["src"].name, threading.current_thread() is threading.main_thread()))

    knobs.compilation.listener = listener
    try:
        yield found
    finally:
        knobs.compilation.listener = before


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(6)]
    return nn.Sequential(*blocks, nn.Linear(256, 32)).cuda()


def train(opt: Layerwise, net: nn.Module, autocast: bool) -> Iterator[int]:
    for step in range(STEPS):
        yield step
        x, y = torch.randn(256, 256, device="cuda"), torch.randint(32, (256,), device="cuda")
        opt.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
    yield STEPS


@pytest.mark.parametrize("autocast", [True, False], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", MEMBERS)
def test_kernels_are_compiled_ahead_and_none_late(name: str, autocast: bool):
    triton = pytest.importorskip("triton")
    net, late = model(), 0
    with compilations(triton) as found:
        opt = MEMBERS[name](net)
        for step in train(opt, net, autocast):
            late = len(found) if step == START_UP else late
    assert found[late:] == []
    assert [kernel for kernel, waited in found if waited] == []
    assert not ahead._THREADS or not any(t.is_alive() for threads in ahead._THREADS.values() for t in threads)


COLD = """
import torch, triton
import layerwise as lw
found = []
triton.knobs.compilation.listener = lambda **event: found.append(bool(event["cache_hit"]))
net = torch.nn.Linear(512, 512).cuda()
opt = lw.optim.SOAP(net)
for _ in range(3):
    net(torch.randn(64, 512, device="cuda")).square().mean().backward()
    opt.step()
print(sum(found), len(found))
"""


def test_processes_compile_where_the_cache_is_empty(tmp_path: Path):
    """So that this one finds nearly all kernels in the cache; not those of a precision that was not expected."""
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", COLD], env=env, capture_output=True, text=True, check=True).stdout
    hits, all_of_them = map(int, said.split())
    assert hits >= 0.8 * all_of_them > 10


@pytest.mark.parametrize("n", [768, 2304])
def test_a_first_basis_on_a_gpu(n: int):
    """Also where TF32 is allowed, in which Gram matrices would not be positive definite."""
    X = torch.randn(2, 2 * n, n, device="cuda") * torch.logspace(0, -3, n, device="cuda")
    M = X.mT @ X / n
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        U, good = iterated_once(M)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert good.all()
    V: Tensor = U.double()
    assert float((V.mT @ V - torch.eye(n, device="cuda")).abs().max()) < 1e-2
    assert float(coupling(V.mT @ M.double() @ V).max()) < 2


def test_first_bases_are_not_decomposed(monkeypatch: pytest.MonkeyPatch):
    """But for small ones, which eigh takes less time for."""
    decomposed, sizes = basis._decomposed, set[int]()

    def counted(M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if M.device.type == "cuda":
            sizes.add(M.shape[-1])
        return decomposed(M)

    monkeypatch.setattr(basis, "_decomposed", counted)
    net = model()
    opt = lw.optim.SOAP(net)
    assert [*train(opt, net, True)][-1] == STEPS
    assert opt.health().fallbacks == 0
    assert sizes == {32}, "of the last layer's outputs"
