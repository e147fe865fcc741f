"""On a GPU: the same draws, the same results as on the CPU within rounding."""

import dataclasses

import pytest
import torch

from layerwise import feature_learning as fl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run `make test-gpu` on one"),
]


@pytest.mark.parametrize(
    "name", ["sgd", "amgd", "amgd_bn", "dfw", "kfac", "ngd", "adam", "altminmin", "foof", "spectral"]
)
def test_cuda_is_cpu(name):
    setting = fl.Setting(dx=16, dy=6, k=3, batch=128, scale="trace")
    rates = [1e-3, 5e-3]
    algorithm = dataclasses.replace(fl.ALGORITHMS[name], lr=rates)
    cpu, gpu = (
        fl.compare({"run": algorithm}, setting=setting, steps=20, seeds=3, device=device)["run"]
        for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(gpu.F @ gpu.G, cpu.F @ cpu.G, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gpu.dist, cpu.dist, rtol=1e-8, atol=1e-9)
    assert gpu.diverged_at.tolist() == cpu.diverged_at.tolist()


def test_divergence_is_seen_on_the_device():
    r = fl.compare({"run": fl.SGD(lr=[1e-9, 1e-2])}, steps=12, seeds=2, device="cuda")["run"]
    assert (r.diverged_at[:, 0] == -1).all()
    assert ((r.diverged_at[:, 1] > 0) & (r.diverged_at[:, 1] <= 10)).all()
    assert r.loss[:, 0].isfinite().all()
