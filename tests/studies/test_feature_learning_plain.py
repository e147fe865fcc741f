"""The batched program against a plain loop from raw samples that shares no code with it."""

import numpy as np
import plain_loop
import pytest
import torch

from layerwise import feature_learning as fl

SETTING = fl.Setting(dx=14, dy=6, k=3, batch=120, scale="trace")
GAUSSIAN = fl.Setting(dx=11, dy=5, k=2, batch=101, data="gaussian", anisotropy="low", repair="abs", noise=0.3)
RATES = [0.02, 0.3]
STEPS = 20

CASES = {
    "sgd": (fl.SGD, {}),
    "adam": (fl.Adam, {}),
    "amgd": (fl.AMGD, {}),
    "dfw": (fl.DFW, {}),
    "kfac": (fl.KFAC, {}),
    "kfac_ridge": (fl.KFAC, {"ridge": 0.3}),
    "altminmin": (fl.MinMin, {}),
    "foof": (fl.FOOF, {"ridge": 0.1}),
    "locoprop": (fl.LocoProp, {}),
    "shampoo": (fl.Shampoo, {"floor": 0.0}),
    "sign": (fl.Sign, {}),
    "spectral": (fl.Spectral, {}),
    "mahalanobis_spectral": (fl.MahalanobisSpectral, {}),
}


def close(found, expected, tolerance=1e-9):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * scale)


def compare(name, algorithm, setting, rates, **options):
    """Two seeds and all rates, in one program and seed by seed."""
    seeds, same = (3, 5), options.get("same_batch", False)
    plain = [[plain_loop.run(name, setting, seed, lr, STEPS, **options) for lr in rates] for seed in seeds]
    for together in (1, 2):
        r = fl.compare(
            {"run": algorithm}, setting=setting, steps=STEPS, seeds=seeds, same_batch=same, together=together
        )["run"]
        for i, of_seed in enumerate(plain):
            for j, (F, G, loss) in enumerate(of_seed):
                close(r.G[i, j].numpy(), G)
                close(r.F[i, j].numpy(), F)
                close(r.loss[i, j, -1].numpy(), loss)


@pytest.mark.parametrize("name", CASES)
def test_every_algorithm_is_the_plain_loop(name, untyped):
    make, options = CASES[name]
    rates = {"sgd": [1e-3, 5e-3], "sign": [1e-3, 1e-2]}.get(name, RATES)
    compare(name, make(lr=rates, **options), SETTING, rates)


@pytest.mark.parametrize("name", ["sgd", "amgd", "dfw", "kfac"])
def test_gaussian_inputs_and_low_anisotropy(name, untyped):
    rates = [1e-4, 2e-3]
    compare(name, CASES[name][0](lr=rates), GAUSSIAN, rates)


@pytest.mark.parametrize("norm", ["coord_batch", "coord_pop", "whiten_batch", "whiten_pop"])
def test_normalised_inputs(norm, untyped):
    compare("amgd", fl.AMGD(lr=RATES, norm=norm), SETTING, RATES, norm=norm)


def test_head_rate_and_one_batch_for_both_layers(untyped):
    compare("kfac", fl.KFAC(lr=RATES, head_lr=0.4), SETTING, RATES, head_lr=0.4, same_batch=True)


@pytest.mark.parametrize("fisher", ["exact", "mc", "empirical"])
def test_natural_gradient_with_a_damped_dense_fisher(fisher, untyped):
    options = {"fisher": fisher, "solver": "damped", "damping": 1e-2}
    compare("ngd", fl.NGD(lr=[0.3], **options), SETTING, [0.3], **options)


@pytest.mark.parametrize("solver", ["closed_form", "pinv"])
def test_natural_gradient_without_damping(solver, untyped):
    compare("ngd", fl.NGD(lr=[0.3], solver=solver), SETTING, [0.3], solver=solver)


def test_the_printed_scale(untyped):
    """Inputs of size 1e2–1e3: the loss is a difference of numbers a million times larger, and keeps eight digits."""
    setting = fl.Setting(dx=14, dy=6, k=3, batch=120)
    r = fl.compare({"run": fl.KFAC(lr=0.3)}, setting=setting, steps=STEPS, seeds=[3])["run"]
    _, G, loss = plain_loop.run("kfac", setting, 3, 0.3, STEPS)
    close(r.G[0].numpy(), G)
    close(r.loss[0, -1].numpy(), loss, 1e-8)
    assert torch.isfinite(r.transfer).all()
