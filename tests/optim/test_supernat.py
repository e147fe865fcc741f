"""SuperNat against the algorithm in its own coordinates, in any plain loop; state, refreshes, bad input."""

import copy
import pickle

import pytest
import torch
from torch import nn

import layerwise as lw
from error_sentences import WORDED
from layerwise.foundations.errors import InputError, NameLookupError
from layerwise.optim import SuperNat
from layerwise.studies.tangent_alignment.supernat import METHODS, NoisyRegression


def linear(P: int) -> nn.Linear:
    model = nn.Linear(P, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model


def descend(model, opt, x, y, steps):
    for _ in range(steps):
        opt.zero_grad()
        (0.5 * (model(x).squeeze(1) - y).square().mean()).backward()
        opt.step()


def in_its_own_coordinates(Phi, y, lr, steps, kappa):
    """Steps 1 to 3 of the algorithm, with the reparametrization done: functions on the examples, and Σ|δw|√Tr K/n."""
    n, P = Phi.shape
    w, divisor, trace = torch.zeros(P, dtype=torch.float64), None, Phi.square().sum()
    Phi_t, bound = Phi.clone(), 0.0
    for _ in range(steps):
        g = (Phi_t @ w - y) / n
        bound += float((lr * Phi_t.T @ g).norm() * Phi_t.norm()) / n
        w = w - lr * Phi_t.T @ g  # step 1
        U, _, Vt = torch.linalg.svd(Phi_t, full_matrices=False)
        pull = (U.T @ g).abs()
        if kappa == "initial-max":
            divisor = pull.max() if divisor is None else divisor
        else:
            divisor = (pull * torch.linalg.svdvals(Phi_t).square()).sum() / trace
        root = (divisor / pull).sqrt()  # √ν_j
        A = Vt.T @ torch.diag(root - 1) @ Vt + torch.eye(P, dtype=torch.float64)  # steps 2 and 3
        w, Phi_t = A.T @ w, Phi_t @ torch.linalg.inv(A).T
    return Phi_t @ w, bound


@pytest.mark.parametrize("kappa", ["initial-max", "trace"])
def test_steps_are_those_of_the_algorithm(kappa):
    """Three steps: after more the stretches differ by so much that an SVD sees the small ones no longer."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 4, generator=rng, dtype=torch.float64), torch.randn(9, generator=rng, dtype=torch.float64)
    model = linear(4)
    descend(model, SuperNat(model, x, lr=0.3, kappa=kappa), x, y, 3)
    expected, _ = in_its_own_coordinates(x, y, 0.3, 3, kappa)
    torch.testing.assert_close(model(x).detach().squeeze(1), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", ["supernat", "supernat-trace"])
def test_the_bound_of_the_path_is_that_of_its_own_coordinates(method):
    study = NoisyRegression(steps=3)
    (features,), (labels,) = study.draw([5])
    (lr,) = study.learning_rates(features[None]).tolist()
    _, expected = in_its_own_coordinates(features, labels, lr, 3, METHODS[method])
    assert float(study.curves([5], method).bound[0]) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("method", METHODS)
def test_the_batched_study_is_this_optimizer(method):
    study = NoisyRegression(steps=30)
    seeds = [0, 7, 3]
    curves = study.curves(seeds, method)
    features, labels = study.draw(seeds)
    for k, lr in enumerate(study.learning_rates(features).tolist()):
        model = linear(11)
        opt = torch.optim.SGD(model.parameters(), lr=lr) if method == "gd" else SuperNat(
            model, features[k], lr=lr, kappa=METHODS[method]
        )  # fmt: skip
        descend(model, opt, features[k], labels[k], 30)
        torch.testing.assert_close(model.weight.detach()[0], curves.weights[k], rtol=1e-6, atol=1e-8)


def test_it_beats_gradient_descent_where_noise_can_be_fitted():
    study = NoisyRegression(steps=400)
    gd, ours = (study.curves(range(1000, 1040), method) for method in ("gd", "supernat"))
    ratio = ours.test[:, -1] / gd.test[:, -1]
    assert float(ratio.mean()) <= 0.25
    assert float((ratio < 1).double().mean()) >= 0.95
    assert bool((ours.bound <= gd.bound).all())


def test_a_study_of_some_seeds_is_that_of_more():
    study = NoisyRegression(steps=20)
    one, more = study.curves([4], "supernat"), study.curves([9, 4, 2], "supernat")
    torch.testing.assert_close(one.test[0], more.test[1], rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(one.bound[0], more.bound[1], rtol=1e-10, atol=1e-14)


def mlp() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def data():
    rng = torch.Generator().manual_seed(2)
    return torch.randn(10, 3, generator=rng, dtype=torch.float64), torch.randint(2, (10,), generator=rng)


def classify(model, opt, steps):
    x, y = data()
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.filterwarnings("ignore:SuperNat of a model that is not linear")
def test_the_first_step_is_gradient_descents():
    one, other = mlp(), mlp()
    classify(one, SuperNat(one, data()[0], lr=0.2), 1)
    classify(other, torch.optim.SGD(other.parameters(), lr=0.2), 1)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:SuperNat of a model that is not linear")
def test_modes_of_a_network():
    """λ_1 is multiplied by |u_jᵀ∇_f L|/κ, with u and ∇_f L computed apart."""
    model, (x, y) = mlp(), data()
    opt = SuperNat(model, x, lr=0.1)
    K = lw.ntk(model, x)
    values, U = K.eigh()
    torch.testing.assert_close(opt.eigenvalues, values.flip(0)[: len(opt.eigenvalues)], rtol=1e-8, atol=1e-10)
    f = model(x).detach().requires_grad_()
    (df,) = torch.autograd.grad(nn.functional.cross_entropy(f, y), f)
    pull = (U.T @ df.flatten()).abs().flip(0)[: len(opt.scales)]
    classify(model, opt, 1)
    torch.testing.assert_close(opt.scales, pull / pull.max(), rtol=1e-6, atol=1e-8)


def test_a_penalty_outside_the_span_is_stepped_plainly():
    model = linear(4)
    x = torch.eye(4, dtype=torch.float64)[:2]  # no output depends on weights 2 and 3
    opt = SuperNat(model, x, lr=0.5)
    for step in range(3):
        opt.zero_grad()
        model.weight.grad = torch.tensor([[0.1, 1.0, 0.0, 2.0]], dtype=torch.float64)
        opt.step()
        assert float(model.weight.detach()[0, 3]) == pytest.approx(-(step + 1))
    assert float(model.weight.detach()[0, 0]) == pytest.approx(-0.05 * (1 + 0.1 + 0.01))


def test_refreshing_an_unchanged_jacobian_changes_nothing():
    """A linear model has one Jacobian: with and without new ones the weights are the same."""
    rng = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 3, generator=rng, dtype=torch.float64), torch.randn(8, generator=rng, dtype=torch.float64)
    one, other = linear(3), linear(3)
    descend(one, SuperNat(one, x, lr=0.3), x, y, 8)
    descend(other, SuperNat(other, x, lr=0.3, refresh_every=1), x, y, 8)
    torch.testing.assert_close(one.weight, other.weight)


def test_a_network_trains_and_its_modes_are_renewed():
    model = mlp()
    opt = SuperNat(model, data()[0], lr=1.0, refresh_every=5)
    first = opt.eigenvalues
    losses = classify(model, opt, 12)
    assert losses[-1] < 0.9 * losses[0]
    assert opt.eigenvalues.shape != first.shape or not torch.allclose(opt.eigenvalues, first)


def test_a_run_goes_on_from_its_state(tmp_path):
    one = mlp()
    opt = SuperNat(one, data()[0], lr=0.5, refresh_every=4)
    classify(one, opt, 5)
    saved = copy.deepcopy(one.state_dict())
    torch.save(opt.state_dict(), tmp_path / "opt.pt")
    classify(one, opt, 4)
    other = mlp()
    other.load_state_dict(saved)
    again = SuperNat(other, data()[0], lr=0.1, refresh_every=4)
    again.load_state_dict(torch.load(tmp_path / "opt.pt"))
    classify(other, again, 4)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:SuperNat of a model that is not linear")
def test_schedules_and_closures():
    model, (x, y) = mlp(), data()
    opt = SuperNat(model, x, lr=0.4)
    schedule = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)

    def closure():
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    before = [p.detach().clone() for p in model.parameters()]
    assert float(opt.step(closure).detach()) > 0
    schedule.step()
    assert opt.param_groups[0]["lr"] == 0.2
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert "SuperNat(lr=0.2" in repr(opt)


@pytest.mark.filterwarnings("ignore:SuperNat of a model that is not linear")
def test_nothing_is_touched_by_making_one():
    model = mlp()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    SuperNat(model, data()[0])
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"kappa": "initial"}, NameLookupError),
        ({"lr": 0.0}, InputError),
        ({"lr": float("nan")}, InputError),
        ({"refresh_every": 0}, InputError),
    ],
)
def test_bad_options(wrong, error, monkeypatch):
    import jaxtyping

    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    model = mlp()
    with pytest.raises(error, match=WORDED):
        SuperNat(model, data()[0], **wrong)


def test_other_bad_input():
    model = linear(3)
    x = torch.ones(4, 3, dtype=torch.float64)
    with pytest.raises(InputError, match="Jacobian of zeros"):
        SuperNat(model, 0 * x)
    opt = SuperNat(model, x)
    with pytest.raises(InputError, match="second group"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(InputError, match="without modes"):
        opt.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    with pytest.raises(InputError, match="modes of 5 parameters"):
        opt.load_state_dict(SuperNat(linear(5), torch.ones(4, 5, dtype=torch.float64)).state_dict())
    with pytest.raises(InputError, match="rate"):
        NoisyRegression(rate=2.5)
    with pytest.raises(NameLookupError, match="supernat"):
        NoisyRegression().curves([0], "supernet")


def test_a_model_that_is_not_linear_wants_new_jacobians():
    x = data()[0]
    with pytest.warns(UserWarning, match="refresh_every=1"):
        SuperNat(mlp(), x)
    SuperNat(mlp(), x, refresh_every=1)
    SuperNat(nn.Linear(x.shape[1], 3).double(), x)  # a warning would be an error


def test_a_step_without_gradients_sets_no_scale():
    x = data()[0]
    model = nn.Linear(x.shape[1], 1).double()
    opt = SuperNat(model, x, lr=0.1)
    opt.step()
    assert torch.equal(opt.scales, torch.ones_like(opt.scales))
    model(x).square().mean().backward()
    opt.step()
    assert float(opt.scales.max()) == pytest.approx(1)


def test_a_copy_goes_on():
    x = data()[0]
    model = nn.Linear(x.shape[1], 1).double()
    opt = SuperNat(model, x, lr=0.1)
    for _ in range(2):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    again = copy.deepcopy(opt)
    assert torch.equal(again.scales, opt.scales)
    assert again.param_groups[0]["params"][0] is next(again.model.parameters())
    assert repr(pickle.loads(pickle.dumps(opt))) == repr(opt)
