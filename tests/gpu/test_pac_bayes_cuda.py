"""Stacks of PAC-Bayes posteriors on a GPU: steps replayed as graphs are those that are made, and go on from a file."""

import copy

import pytest
import torch
from torch import nn

from layerwise.bounds.pac_bayes.options import Options
from layerwise.bounds.pac_bayes.run import Run
from layerwise.bounds.pac_bayes.together import _Stack, optimize_together

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run `make test-gpu` on one"),
]
EPOCHS = 4


def runs() -> list[Run]:
    torch.manual_seed(0)
    init = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).double().cuda()
    model = copy.deepcopy(init)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    x = torch.randn(80, 6, dtype=torch.float64, device="cuda")
    common = {"delta": 0.025, "delta_draws": 0.01, "cap": 0.1, "precision": 100, "decay": 0.3, "milestones": (0.5,)}
    common |= {"epochs": EPOCHS, "batch_size": 16, "lr": 1e-2, "interval": 2, "draws": 8}
    return [Run(model, init, (x, (x[:, 0] > 0).long()), Options(method=m, **common)) for m in ("base", "iter", "ekfac")]


def test_replayed_steps_are_those_that_are_made():
    replayed, made = _Stack(runs()), _Stack(runs())
    made.step = lambda *parts, key: made._step(*parts)
    for epoch in range(EPOCHS):
        replayed.epoch(epoch, record=True)
        made.epoch(epoch, record=True)
    assert replayed.step.fault is None
    assert len(replayed.step._recorded) > 0
    torch.testing.assert_close(replayed.theta, made.theta, rtol=1e-9, atol=1e-11)


class Stopping:
    """Progress that ends after two epochs."""

    def track(self, items, description, total):
        for number, item in enumerate(items):
            if number == 2:
                raise KeyboardInterrupt
            yield item


def test_a_stack_that_was_stopped_goes_on(tmp_path):
    path, whole = tmp_path / "runs.stack", optimize_together(runs())
    with pytest.raises(KeyboardInterrupt):
        optimize_together(runs(), progress=Stopping(), keep=path, save_every=1)
    for found, expected in zip(optimize_together(runs(), keep=path, save_every=1), whole, strict=True):
        assert found.posterior is not None
        assert expected.posterior is not None
        torch.testing.assert_close(found.posterior.theta, expected.posterior.theta, rtol=1e-9, atol=1e-11)
