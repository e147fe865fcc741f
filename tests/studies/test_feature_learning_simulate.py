"""The whole program: independence of runs, divergence, shapes, the paper's outcomes in small."""

import pytest
import torch

from layerwise import feature_learning as fl

SMALL = fl.Setting(dx=16, dy=6, k=3, batch=128)
FIELDS = ("loss", "population_loss", "dist", "transfer", "F", "G", "diverged_at")


def same(a, b):
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in FIELDS)


def part(result, seed, rate=None):
    """A seed (and rate) of a result, as if it had run alone."""
    index = result.seeds.index(seed)
    values = {name: getattr(result, name)[[index]] for name in FIELDS}
    if rate is not None:
        values = {name: value[:, [result.lr.index(rate)]] for name, value in values.items()}
    lr = result.lr if rate is None else [rate]
    return fl.Result(seeds=(seed,), lr=lr, iteration=result.iteration, **values)


def run(algorithms, setting=SMALL, steps=25, **options):
    return fl.compare(algorithms, setting=setting, steps=steps, **options)


def test_the_same_again_bit_for_bit(untyped):
    names = ["sgd", "amgd", "amgd_bn", "dfw", "kfac", "ngd", "adam", "altminmin"]
    first, again = run(names, seeds=[4]), run(names, seeds=[4])
    assert all(same(first[name], again[name]) for name in names)


@pytest.mark.parametrize("scale", ["none", "trace"])
def test_a_seed_does_not_depend_on_other_seeds_bit_for_bit(scale, untyped):
    names = ["sgd", "amgd", "dfw", "kfac", "ngd", "adam"]
    setting = fl.Setting(dx=16, dy=6, k=3, batch=128, scale=scale)
    many, alone = run(names, setting, seeds=[0, 1, 2]), run(names, setting, seeds=[1])
    assert all(same(part(many[name], 1), alone[name]) for name in names)


@pytest.mark.parametrize("name", ["sgd", "kfac", "dfw", "ngd", "adam"])
def test_a_seed_in_one_program_with_others(name, untyped):
    """Within rounding: a library of linear algebra may choose by the number of matrices."""
    setting = fl.Setting(dx=16, dy=6, k=3, batch=128, scale="trace")
    many, alone = run([name], setting, seeds=[0, 1, 2], together=3)[name], run([name], setting, seeds=[1])[name]
    torch.testing.assert_close(many.G[[1]], alone.G, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(many.dist[[1]], alone.dist, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["sgd", "kfac", "dfw", "ngd", "adam"])
def test_a_rate_does_not_depend_on_other_rates(name, untyped):
    setting = fl.Setting(dx=16, dy=6, k=3, batch=128, scale="trace")
    rates = [1e-4, 3e-3, 1e-2]
    many = fl.compare({"run": type(fl.ALGORITHMS[name])(lr=rates)}, setting=setting, steps=25)["run"]
    alone = fl.compare({"run": type(fl.ALGORITHMS[name])(lr=[3e-3])}, setting=setting, steps=25)["run"]
    torch.testing.assert_close(many.G[:, [1]], alone.G, rtol=1e-12, atol=1e-12)


def test_an_algorithm_does_not_depend_on_others(untyped):
    assert same(run(["kfac", "sgd", "amgd"])["kfac"], run(["kfac"])["kfac"])


def test_sgd_overflows_at_the_printed_scale_and_harms_nobody(untyped):
    r = fl.compare({"sgd": fl.SGD(lr=[1e-9, 1e-2])}, setting=fl.Setting(), steps=12, seeds=2)["sgd"]
    assert ((r.diverged_at[:, 1] > 0) & (r.diverged_at[:, 1] <= 10)).all()
    assert (r.diverged_at[:, 0] == -1).all()
    assert r.loss[:, 0].isfinite().all()
    assert (r.dist[:, 1, -1] == 1.0).all()
    assert r.loss[:, 1, -1].isinf().all()
    assert r.transfer[:, 1, -1].isinf().all()
    assert r.G.isfinite().all()
    alone = fl.compare({"sgd": fl.SGD(lr=[1e-9])}, setting=fl.Setting(), steps=12, seeds=2)["sgd"]
    torch.testing.assert_close(r.G[:, :1], alone.G, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["shampoo", "spectral", "mahalanobis_spectral", "foof", "locoprop"])
def test_runs_that_are_not_finite_do_not_stop_the_others(name, untyped):
    r = fl.simulate(name, lr=[1e-3, 1e300], steps=6, dx=16, dy=6, k=3, batch=128, scale="trace")
    alone = fl.simulate(name, lr=[1e-3], steps=6, dx=16, dy=6, k=3, batch=128, scale="trace")
    torch.testing.assert_close(r.G[:, :1], alone.G, rtol=1e-11, atol=1e-11)
    assert r.dist[0, 0].isfinite().all()
    if name not in ("mahalanobis_spectral", "locoprop"):  # the one is orthonormalised, the other an implicit step
        assert int(r.diverged_at[0, 1]) > 0


def test_shapes_and_schedule():
    r = fl.simulate("kfac", steps=7, every=3, seeds=range(2), dx=8, dy=4, k=2, batch=40)
    assert r.iteration == (0, 3, 6, 7)
    assert r.dist.shape == r.loss.shape == r.transfer.shape == r.population_loss.shape == (2, 4)
    assert r.G.shape == (2, 2, 8)
    assert r.diverged_at.tolist() == [-1, -1]
    many = fl.simulate("kfac", lr=[0.1, 0.2], steps=2, seeds=range(2), dx=8, dy=4, k=2, batch=40)
    assert many.dist.shape == (2, 2, 3)


def test_the_number_of_threads_is_left_as_it_was():
    before = torch.get_num_threads()
    run(["kfac"], steps=1)
    assert torch.get_num_threads() == before


def test_single_precision_follows_double(untyped):
    options = {"setting": fl.Setting(dx=16, dy=6, k=3, batch=128, scale="max", anisotropy="low", repair="scaled")}
    wide = run(["kfac"], steps=20, **options)["kfac"]
    narrow = run(["kfac"], steps=20, dtype=torch.float32, **options)["kfac"]
    assert narrow.dist.dtype == torch.float32
    torch.testing.assert_close(narrow.dist.double(), wide.dist, rtol=1e-3, atol=1e-4)


def test_batches_smaller_than_the_input_serve_those_that_invert_nothing(untyped):
    r = fl.compare(
        {"sgd": fl.SGD(lr=1e-4), "kfac": fl.KFAC(ridge=0.1), "damped": fl.NGD(lr=1e-2, solver="damped")},
        setting=fl.Setting(dx=16, dy=6, k=3, batch=10, scale="trace"),
        steps=5,
    )
    assert all((x.diverged_at == -1).all() for x in r.values())


def test_without_noise_kfac_converges_to_the_representation(untyped):
    """Theorem 3.6 without noise: distances shrink by 1 − η a step."""
    r = fl.simulate("kfac", lr=0.5, steps=60, every=1, noise=0.0, scale="trace", dx=16, dy=6, k=3, batch=128)
    ratios = r.dist[0, 11:31] / r.dist[0, 10:30]
    assert ratios == pytest.approx(torch.full_like(ratios, 0.5), rel=0.02)
    assert float(r.dist[0, -1]) < 1e-10


def test_whitening_leads_to_the_whitened_representation(untyped):
    """AMGD on whitened inputs learns rowsp(G⋆Σ^½), which is not G⋆."""
    from layerwise.foundations.random import stream
    from layerwise.studies.feature_learning.problem import draw_problem

    setting = fl.Setting(dx=16, dy=6, k=1, batch=512, scale="trace", noise=0.01)
    p = draw_problem(setting, stream(0, "problem"))
    r = fl.compare({"run": fl.AMGD(lr=0.1, norm="whiten_pop")}, setting=setting, steps=300)["run"]
    limit = float(fl.subspace_distance(p.G @ p.train.root, p.G))
    assert float(fl.subspace_distance(r.G[0], p.G @ p.train.root)) < 0.01
    assert float(r.dist[0, -1]) == pytest.approx(limit, rel=0.01)
    assert limit > 0.1


def test_dfw_feels_the_smallest_eigenvalue_of_the_head_and_kfac_does_not(untyped):
    """Without noise, near G⋆: KFAC's distance shrinks by 1 − η a step, DFW's by 1 − η λ_min(F⋆ᵀF⋆)."""
    from layerwise.foundations.random import stream
    from layerwise.studies.feature_learning.problem import draw_problem

    setting = fl.Setting(dx=16, dy=6, k=3, batch=128, scale="trace", noise=0.0)
    for seed in (0, 1):
        p = draw_problem(setting, stream(seed, "problem"))
        smallest = float(torch.linalg.svdvals(p.train.map)[2]) ** 2
        r = fl.compare(
            {"kfac": fl.KFAC(lr=0.05), "dfw": fl.DFW(lr=0.05)}, setting=setting, steps=260, seeds=[seed], every=5
        )
        for name, expected in {"kfac": 1 - 0.05, "dfw": 1 - 0.05 * smallest}.items():
            dist = r[name].dist[0]
            small = dist[(dist < 1e-3) & (dist > 1e-11)]
            assert len(small) >= 5
            assert float((small[-1] / small[0]) ** (1 / (5 * (len(small) - 1)))) == pytest.approx(expected, rel=0.01)
