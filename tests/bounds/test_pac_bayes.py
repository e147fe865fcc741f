"""PAC-Bayes: gradients and KL against dense Gaussians and autograd, bases that diagonalize, stopping and going on."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

import layerwise as lw
from layerwise import bounds
from layerwise.bounds.pac_bayes.bases import Bases, kronecker_bases, standard_bases
from layerwise.bounds.pac_bayes.examples import Examples
from layerwise.bounds.pac_bayes.monte_carlo import stochastic_error
from layerwise.bounds.pac_bayes.options import Options
from layerwise.bounds.pac_bayes.posterior import Objective, Posterior, start
from layerwise.bounds.pac_bayes.prior import PriorGrid
from layerwise.bounds.pac_bayes.run import Run
from layerwise.bounds.pac_bayes.together import optimize_together
from layerwise.foundations.errors import FileFormatError, InputError, NameLookupError, UnsupportedError
from layerwise.foundations.progress import Bar
from layerwise.foundations.tf32 import tf32

SHORT = {"epochs": 4, "batch_size": 10, "interval": 2, "draws": 20, "lr": 0.01}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()


def conv() -> nn.Sequential:
    layers = [nn.Conv2d(1, 2, 2), nn.GroupNorm(1, 2), nn.ReLU(), nn.Conv2d(2, 4, 1, groups=2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16, 3)).double()


def batch(model: nn.Module, n: int = 30):
    shape = (1, 3, 3) if isinstance(model[0], nn.Conv2d) else (3,)
    x = torch.randn(n, *shape, dtype=torch.float64)
    return x, (x.flatten(1)[:, 0] > 0).long()


def moved(model: nn.Module, size: float = 0.5) -> nn.Module:
    """What a training might make of it."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        for p in found.parameters():
            p.add_(size * torch.randn_like(p))
    return found


def rotation(bases: Bases) -> torch.Tensor:
    """The matrix of `to_standard`."""
    eye = torch.eye(bases.table.numel(), dtype=torch.float64)
    return bases.to_standard(eye).mT


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(("make", "bias"), [(mlp, "rotate"), (mlp, "leave"), (conv, "joint"), (conv, "rotate")])
def test_bases_are_orthogonal_alone_and_in_a_batch(make, bias):
    model = make()
    bases = kronecker_bases(model, batch(model), "iter", bias, curvature=True)
    T = rotation(bases)
    torch.testing.assert_close(T.mT @ T, torch.eye(len(T), dtype=torch.float64))
    v = torch.randn(len(T), dtype=torch.float64)
    torch.testing.assert_close(bases.to_standard(v), T @ v)  # alone, without copies, and among others
    torch.testing.assert_close(bases.to_basis(v), T.mT @ v)


@pytest.mark.parametrize("make", [mlp, conv])
def test_with_joint_biases_the_basis_diagonalizes_k_fac(make):
    model = make()
    data = batch(model)
    bases = kronecker_bases(model, data, "iter", "joint", curvature=True)
    fisher = lw.fisher(model, data, structure="kfac", estimator="exact")
    T = rotation(bases)
    turned = T.mT @ fisher.to_dense() @ T
    assert bases.curvature is not None
    torch.testing.assert_close(turned.diagonal(), bases.curvature)
    if make is mlp:  # a norm keeps its block, and the standard basis
        torch.testing.assert_close(turned, torch.diag(bases.curvature), atol=1e-12, rtol=0)


def test_the_bases_of_the_thesis():
    """U of E[M] and V of E[xxᵀ], from autograd; biases by U alone."""
    model = mlp()
    x, y = batch(model)
    T = rotation(kronecker_bases(model, (x, y), "iter", "rotate"))

    def loss(z):
        return nn.functional.cross_entropy(model[2](torch.relu(z)), y[:1])

    rows = model[0](x).detach().unsqueeze(1)
    M = torch.stack([torch.autograd.functional.hessian(loss, row).reshape(4, 4) for row in rows]).mean(0)
    S = x.mT @ x / len(x)
    weight = T[:12, :12].mT @ torch.kron(M, S) @ T[:12, :12]
    torch.testing.assert_close(weight, torch.diag(weight.diagonal()), atol=1e-12, rtol=0)
    along_bias = T[12:16, 12:16].mT @ M @ T[12:16, 12:16]
    torch.testing.assert_close(along_bias, torch.diag(along_bias.diagonal()), atol=1e-12, rtol=0)


def test_iter_m_has_the_products_of_weights():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    x, y = batch(model)
    bases = kronecker_bases(model, (x, y), "iter-m", "rotate")
    p = torch.softmax(model(x).detach(), 1)
    A = torch.diag(p.mean(0)) - p.mT @ p / len(x)
    S = (model[4].weight @ model[2].weight).detach()
    U = bases.rotations["0"].left[0]
    turned = U.mT @ (S.mT @ A @ S / 16) @ U
    torch.testing.assert_close(turned, torch.diag(turned.diagonal()), atol=1e-12, rtol=0)
    model = conv()
    with pytest.raises(UnsupportedError, match=r"chain of nn\.Linear"):
        kronecker_bases(model, batch(model), "iter-m", "rotate")


def posterior_of(model: nn.Module, data, bases: Bases, cap: float = 0.1) -> Posterior:
    init = moved(model, 0.3)
    objective = Objective(flat(init), PriorGrid(cap), len(data[1]), 0.025, 1.5)
    return start(objective, flat(model), bases, "rotated")


def test_kl_is_that_of_dense_gaussians_and_adds_up_over_layers():
    model = mlp()
    data = batch(model)
    q = posterior_of(model, data, kronecker_bases(model, data, "iter", "rotate"))
    found = q.bound(0.1)
    T = rotation(q.bases)
    Q = MultivariateNormal(q.mean, T @ torch.diag((2 * q.log_std).exp()) @ T.mT)
    lam = math.exp(2 * found["half_log_lambda"])
    P = MultivariateNormal(q.objective.prior_mean, lam * torch.eye(len(T), dtype=torch.float64))
    assert found["kl"] == pytest.approx(float(kl_divergence(Q, P)), rel=1e-10)
    by_layer = q.layer_kl(found["half_log_lambda"])
    assert sum(by_layer.values()) == pytest.approx(found["kl"], rel=1e-10)
    assert set(by_layer) == {"0", "2"}
    rounded = q.on_grid(torch.tensor(0.1, dtype=torch.float64))
    at = q.bound(0.1, int(rounded["j"]))
    assert float(rounded["bound"]) == pytest.approx(at["bound"], rel=1e-12)
    assert at["bound"] >= found["bound"]  # the best prior is never worse than the nearest


@pytest.mark.parametrize("method", ["base", "iter", "ekfac"])
def test_gradients_are_those_of_autograd(method):
    model = mlp()
    x, y = batch(model)
    bases = standard_bases(model, (x, y), False)
    if method != "base":
        bases = kronecker_bases(model, (x, y), method, "joint" if method == "ekfac" else "rotate")
    q = posterior_of(model, (x, y), bases)
    T, noise, P = rotation(bases), torch.randn_like(q.mean), len(q.mean)
    theta = q.theta.clone().requires_grad_()
    w, log_std, rho = theta[:P], theta[P:-1], theta[-1]
    params = lw.ParamVector.from_flat(w + T @ (noise * log_std.exp()), model).dict()
    loss = 1.5 * nn.functional.cross_entropy(torch.func.functional_call(model, params, (x,)), y)
    kl = kl_divergence(
        MultivariateNormal(w, T @ torch.diag((2 * log_std).exp()) @ T.mT),
        MultivariateNormal(q.objective.prior_mean, (2 * rho).exp() * torch.eye(P, dtype=torch.float64)),
    )
    j = 100 * (math.log(0.1) - 2 * rho)
    rate = (kl + 2 * j.log() + math.log(math.pi**2 * 30 / (6 * 0.025))) / 29
    (expected,) = torch.autograd.grad(loss + (rate / 2).sqrt(), theta)
    wrong = q.backward(model, x, y, noise=noise)
    torch.testing.assert_close(q.grad, expected, rtol=1e-9, atol=1e-12)
    f = torch.func.functional_call(model, params, (x,))
    assert int(wrong) == int((f.argmax(1) != y).sum())


def test_variances_from_curvature_minimize_the_quadratic_model():
    model = mlp()
    data = batch(model)
    bases = kronecker_bases(model, data, "ekfac", "joint", curvature=True)
    objective = Objective(flat(moved(model, 0.1)), PriorGrid(10.0), 3000, 0.025, 1.0)
    q = start(objective, flat(model), bases, "curvature")
    log_s, rho = (2 * q.log_std).clone().requires_grad_(), q.half_log
    moved_by = (q.mean - objective.prior_mean).square().sum()
    P = len(log_s)
    kl = 0.5 * ((log_s.exp().sum() + moved_by) * (-2 * rho).exp() - P + 2 * P * rho - log_s.sum())
    j = PriorGrid(10.0).index(float(rho))
    rate = (kl + 2 * math.log(j) + math.log(math.pi**2 * 3000 / (6 * 0.025))) / 2999
    assert bases.curvature is not None
    cost = 0.5 * (bases.curvature * log_s.exp()).sum() + (rate / 2).sqrt()
    (gradient,) = torch.autograd.grad(cost, log_s)
    terms = 0.5 * bases.curvature * log_s.exp().detach()
    assert float(gradient.abs().max()) < 1e-6 * float(terms.max())
    assert float(rho) == pytest.approx(0.5 * math.log(float(log_s.detach().exp().sum() + moved_by) / P), abs=1e-6)


def test_lambda_stays_on_the_grid():
    model = mlp()
    data = batch(model)
    q = posterior_of(model, data, standard_bases(model, data, False))
    q.half_log.fill_(5.0)
    q.project()
    assert float(q.half_log) == pytest.approx(PriorGrid().half_log(1))
    q.backward(model, *data, noise=torch.zeros_like(q.mean))
    assert bool(torch.isfinite(q.grad).all())


def test_the_error_of_drawn_networks():
    model = mlp()
    data = batch(model)
    q = posterior_of(model, data, kronecker_bases(model, data, "iter", "rotate"))
    examples = Examples(data, 10, 0, torch.device("cpu"))

    def drawn(n: int, per_draw: int | None = None) -> float:
        return stochastic_error(model, q, examples, n, torch.Generator().manual_seed(0), per_draw)

    params = q.draw(5, torch.Generator().manual_seed(0))
    by_hand = [
        torch.func.functional_call(model, {k: v[i] for k, v in params.items()}, (data[0],)).argmax(1) != data[1]
        for i in range(5)
    ]
    assert drawn(5) == pytest.approx(float(torch.stack(by_hand).double().mean()))
    covariance = torch.cov(torch.cat([v.flatten(1) for v in q.draw(20_000, torch.Generator()).values()], 1).mT)
    T = rotation(q.bases)
    expected = T @ torch.diag((2 * q.log_std).exp()) @ T.mT
    assert float((covariance - expected).norm() / expected.norm()) < 0.05
    assert drawn(2000, per_draw=7) == pytest.approx(drawn(1000), abs=0.05)
    assert bounds.error_limit(0.1, 100, 0.01) > bounds.error_limit(0.1, 1000, 0.01) > 0.1


class Stopping:
    """Progress that is killed after some epochs."""

    def __init__(self, after: int) -> None:
        self.after = after

    def track(self, items, description, total):
        for number, item in enumerate(items):
            if number == self.after:
                raise KeyboardInterrupt
            yield item


@pytest.mark.parametrize("method", ["appr", "iter"])
def test_a_run_that_was_stopped_goes_on(tmp_path, method):
    init = mlp()
    model, data, path = moved(init), batch(init), tmp_path / "run.safetensors"
    whole = bounds.pac_bayes(model, init, data, method, **SHORT)
    before = flat(model)
    with pytest.raises(KeyboardInterrupt):
        bounds.pac_bayes(model, init, data, method, checkpoint=path, checkpoint_every=1, progress=Stopping(3), **SHORT)
    resumed = bounds.pac_bayes(model, init, data, method, checkpoint=path, checkpoint_every=1, **SHORT)
    assert whole.posterior is not None
    assert resumed.posterior is not None
    torch.testing.assert_close(resumed.posterior.theta, whole.posterior.theta)
    assert [row["epoch"] for row in resumed.history] == [1, 2, 3, 4]
    assert resumed.bound == pytest.approx(whole.bound)
    assert torch.equal(before, flat(model))
    with pytest.raises(FileFormatError, match="another model"):
        bounds.pac_bayes(model, init, data, method, checkpoint=path, **{**SHORT, "lr": 0.02})


class Seeing:
    """Progress that remembers what it was given."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def track(self, items, description, total):
        self.seen.append(list(items))
        yield from self.seen[-1]


MEMBERS = (("base", 0.1, 0, 2), ("iter", 1.0, 0, 2), ("ekfac", 0.1, 1, 10), ("iter-d", 0.1, 1, 1))
"""Method, cap, seed and interval: bases of the beginning, with curvature and without, and of later means."""


def stack_of(model, init, data, **changes) -> list[Run]:
    common = {"delta": 0.025, "delta_draws": 0.01, "precision": 100, "decay": 0.3, "milestones": (0.5,)}
    named = [dict(zip(("method", "cap", "seed", "interval"), member, strict=True)) for member in MEMBERS]
    return [Run(model, init, data, Options(**{**SHORT, **common, **member, **changes})) for member in named]


def assert_same(found, whole) -> None:
    for ours, other in zip(found, whole, strict=True):
        assert ours.posterior is not None
        assert other.posterior is not None
        torch.testing.assert_close(ours.posterior.theta, other.posterior.theta)
        for name, rotated in other.posterior.bases.rotations.items():
            torch.testing.assert_close(ours.posterior.bases.rotations[name].left, rotated.left)
        assert [row["epoch"] for row in ours.history] == [1, 2, 3, 4]
        for row, expected in zip(ours.history, other.history, strict=True):
            assert row == pytest.approx(expected)
        assert ours.bound == pytest.approx(other.bound)


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
@pytest.mark.parametrize(("save_every", "after", "goes_on_from"), [(1, 1, 1), (1, 3, 3), (2, 3, 2), (10, 3, 0)])
def test_a_stack_that_was_stopped_goes_on(tmp_path, optimizer, save_every, after, goes_on_from):
    init = mlp()
    model, data, path = moved(init), batch(init), tmp_path / "new folder" / "runs.stack"

    def found(progress, keep):
        runs = stack_of(model, init, data, optimizer=optimizer)
        return optimize_together(runs, every=1, progress=progress, keep=keep, save_every=save_every)

    whole = found(None, None)
    with pytest.raises(KeyboardInterrupt):
        found(Stopping(after), path)
    assert path.exists() == (goes_on_from > 0)
    seen = Seeing()
    assert_same(found(seen, path), whole)
    assert seen.seen == [list(range(goes_on_from, SHORT["epochs"]))]


def test_a_stack_that_was_stopped_among_the_drawn_networks_goes_on(tmp_path, monkeypatch):
    init = mlp()
    model, data, path, seen = moved(init), batch(init), tmp_path / "runs.stack", Seeing()
    whole = optimize_together(stack_of(model, init, data), every=1)

    def stopped(self, posterior):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "finished", stopped)
        with pytest.raises(KeyboardInterrupt):
            optimize_together(stack_of(model, init, data), every=1, keep=path)
    more = stack_of(model, init, data, draws=40)  # these alone may be others
    assert [r.draws for r in optimize_together(more, every=1, keep=path)] == [40] * len(MEMBERS)
    assert_same(optimize_together(stack_of(model, init, data), every=1, progress=seen, keep=path), whole)
    assert seen.seen == [[]]


def test_a_file_of_another_stack_is_refused(tmp_path):
    init = mlp()
    model, data, path = moved(init), batch(init), tmp_path / "runs.stack"
    runs = stack_of(model, init, data)
    optimize_together(runs, keep=path)
    before = path.read_bytes()
    others = {
        "lr": stack_of(model, init, data, lr=0.02),
        "weights": stack_of(moved(init), init, data),
        "data": stack_of(model, init, batch(init)),
        "fewer": runs[:2],
        "order": runs[::-1],
    }
    for other in others.values():
        with pytest.raises(FileFormatError, match="another model"):
            optimize_together(other, keep=path)
    for options in ({"every": 2}, {"rounded": True}):
        with pytest.raises(FileFormatError, match="another model"):
            optimize_together(stack_of(model, init, data), keep=path, **options)
    with pytest.raises(FileFormatError, match="another model"):  # nor is a stack of one a run
        bounds.pac_bayes(model, init, data, "base", checkpoint=path, **SHORT)
    assert path.read_bytes() == before
    with pytest.raises(InputError, match=r"keep=.*, a folder"):
        optimize_together(runs, keep=tmp_path)
    with pytest.raises(InputError, match="save_every=0"):
        optimize_together(runs, keep=path, save_every=0)
    path.write_bytes(before[:-10])
    with pytest.raises(FileFormatError, match="cannot be read"):
        optimize_together(runs, keep=path)


def test_runs_together_are_as_alone():
    """Without new bases on the way, since those of a null space are arbitrary, and by SGD: where a gradient is zero but
    for rounding, RMSprop divides it by its own size.
    """
    init = mlp()
    data, model = batch(init), moved(init)
    short = {**SHORT, "interval": 10, "optimizer": "sgd"}
    options = [
        Options(
            method=m, cap=c, seed=s, delta=0.025, delta_draws=0.01, precision=100, decay=0.3, milestones=(0.5,), **short
        )
        for m, c, s in (("base", 0.1, 0), ("iter", 1.0, 0), ("ekfac", 0.1, 1), ("appr", 0.1, 1))
    ]
    together = optimize_together([Run(model, init, data, o) for o in options])
    for option, found in zip(options, together, strict=True):
        run = Run(model, init, data, option)
        alone = run.finished(run.optimized())
        assert found.posterior is not None
        assert alone.posterior is not None
        torch.testing.assert_close(found.posterior.theta, alone.posterior.theta, rtol=1e-8, atol=1e-10)
        assert found.bound == pytest.approx(alone.bound)


def test_bases_of_a_stack_are_computed_anew():
    init = mlp()
    data, model = batch(init), moved(init)
    common = {"delta": 0.025, "delta_draws": 0.01, "cap": 0.1, "precision": 100, "decay": 0.3, "milestones": (0.5,)}
    runs = [Run(model, init, data, Options(method=m, **common, **SHORT)) for m in ("appr", "iter")]
    first = runs[1].begun().bases.rotations["0"].left.clone()
    appr, iterated = optimize_together(runs, every=1)
    assert appr.posterior is not None
    assert iterated.posterior is not None
    torch.testing.assert_close(appr.posterior.bases.rotations["0"].left, first)
    assert not torch.allclose(iterated.posterior.bases.rotations["0"].left, first)
    assert len(appr.history) == SHORT["epochs"]


@pytest.mark.parametrize("method", ["base", "iter", "ekfac"])
def test_any_model(method):
    init = conv()
    model, data = moved(init), batch(init)
    found = bounds.pac_bayes(model, init, data, method, **SHORT)
    assert 0 <= found.error <= found.bound_without_correction <= found.bound <= 1
    assert found.j >= 1
    assert set(found.layer_kl) == {"0", "1", "3", "5"}
    assert sum(found.layer_kl.values()) == pytest.approx(found.kl)
    assert 0 <= found.error_on(data, draws=5) <= 1
    assert found.sample(3)["5.weight"].shape == (3, 3, 16)
    loader = [(data[0][:20], data[1][:20]), (data[0][20:], data[1][20:])]
    assert bounds.pac_bayes(model, init, loader, method, **{**SHORT, "epochs": 1}).examples == 30


def test_better_with_training_and_better_with_curvature():
    """On a problem of two blobs the bound is far from vacuous, and the curvature's start is the better one."""
    torch.manual_seed(1)
    y = torch.arange(400) % 2
    x = torch.randn(400, 4) * 0.5 + 2 * (y.unsqueeze(1) - 0.5)
    init = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model = copy.deepcopy(init)
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    options = {"epochs": 12, "lr": 0.01, "batch_size": 50, "draws": 100}
    found = bounds.pac_bayes(model, init, (x, y), "ekfac", **options)
    assert found.bound < 0.4
    assert found.history[-1]["bound"] < found.history[0]["bound"] + 0.05
    plain = bounds.pac_bayes(model, init, (x, y), "iter", **options)
    assert found.history[0]["kl"] < plain.history[0]["kl"]


def mistakes():
    def shapes():
        return {"init": nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double()}

    def nan():
        model = mlp()
        nn.init.constant_(model[0].weight, math.nan)
        return {"model": model}

    return {
        "0 < delta": {"delta": 0.0, "says": "delta=0.0"},
        "delta < 1": {"delta": 1.0, "says": "delta=1.0"},
        "delta_draws": {"delta_draws": -0.1, "says": "delta_draws"},
        "cap": {"cap": 0.0, "says": "cap=0.0"},
        "method": {"method": "itre", "says": "Did you mean 'iter"},
        "initial": {"initial": "zero", "says": "initial='zero'"},
        "bias of ekfac": {"method": "ekfac", "bias": "leave", "says": "EKFAC counts biases"},
        "shapes": {**shapes(), "says": "0.weight"},
        "nan": {**nan(), "says": "not finite"},
        "labels beyond": {"y": torch.full((30,), 2), "says": "labels from 2 to 2 for 2 classes"},
        "labels of targets": {"y": torch.randn(30), "says": "one class index an example"},
        "no labels": {"y": None, "says": "labels: none"},
        "epochs": {"epochs": 0, "says": "epochs=0"},
        "milestones": {"milestones": (2,), "says": "milestones"},
        "batch_size": {"batch_size": 0, "says": "batch_size=0"},
        "probabilities": {"delta": 0.9, "delta_draws": 0.1, "says": "a sum below 1"},
    }


@pytest.mark.parametrize("mistake", mistakes())
def test_one_clear_error_each(mistake):
    given = mistakes()[mistake]
    says = given.pop("says")
    model = given.pop("model", None) or mlp()
    init = given.pop("init", None) or moved(model)
    x, y = batch(model)
    data = (x, given.pop("y")) if "y" in given else (x, y)
    with pytest.raises((InputError, NameLookupError), match=says):
        bounds.pac_bayes(model, init, data, given.pop("method", "iter"), **{**SHORT, **given})


def test_what_the_prior_may_not_have_seen():
    init = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    model, data = copy.deepcopy(init), batch(init)
    model(data[0])  # running statistics
    with pytest.raises(InputError, match="may not depend on the data"):
        bounds.pac_bayes(model, init, data, **SHORT)
    with pytest.raises(InputError, match="more than once"):
        bounds.pac_bayes(mlp(), mlp(), (b for b in [data]), **SHORT)


def test_progress_shows_the_current_bound(capsys):
    init = mlp()
    found = bounds.pac_bayes(moved(init), init, batch(init), "base", progress=Bar(delay=0.0), **SHORT)
    assert f"bound {found.history[-2]['bound']:.4f}" in capsys.readouterr().err


@pytest.mark.parametrize("rounded", [True, False])
def test_only_steps_are_rounded(rounded: bool, monkeypatch: pytest.MonkeyPatch):
    """Products of steps may be in TF32; bases, drawn networks and their bound are in full precision."""
    init = mlp()
    model, data = moved(init), batch(init)
    seen: dict[str, set[str]] = {"step": set(), "bases": set(), "drawn": set()}

    def noting(kind: str, call):
        def noted(*given, **options):
            seen[kind].add(torch.get_float32_matmul_precision())
            return call(*given, **options)

        return noted

    monkeypatch.setattr(Posterior, "backward", noting("step", Posterior.backward))
    monkeypatch.setattr(Posterior, "draw", noting("drawn", Posterior.draw))
    monkeypatch.setattr(Run, "bases", noting("bases", Run.bases))
    with tf32(True):  # what the caller has set for the rest of the program
        optimize_together(stack_of(model, init, data), rounded=rounded)
        assert torch.get_float32_matmul_precision() == "high"
    assert seen == {"step": {"high" if rounded else "highest"}, "bases": {"highest"}, "drawn": {"highest"}}
