"""The quadratic model: closed forms against an ODE solver of the weights themselves, and its three examples."""

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from error_sentences import WORDED
from layerwise import theory
from layerwise.foundations.errors import InputError, NameLookupError

TIMES = np.linspace(0, 3, 25)


def random_data(seed: int, n: int = 5, d: int = 7):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, d)), rng.standard_normal(n)


def solved(model, linear: bool, constant: bool = True):
    """θ(t) in the basis v by a solver, with the gradient by hand: of ½w², or of its tangent at the start."""
    w0 = np.sqrt(2 * model.start)

    def theta(w):
        return w * w0 - constant * w0**2 / 2 if linear else w**2 / 2

    def velocity(_, w):
        residual = model.X @ (model.V @ theta(w)) - model.y
        return -(w0 if linear else w) * (model.V.T @ (model.X.T @ residual))

    found = solve_ivp(velocity, (0, TIMES[-1]), w0, method="DOP853", t_eval=TIMES, rtol=1e-12, atol=1e-13)
    return np.stack([theta(w) for w in found.y.T])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", [(5, 7), (7, 5)])
def test_flows_are_what_a_solver_finds(seed, shape):
    model = theory.quadratic_model(*random_data(seed, *shape), scale=0.1)
    assert np.abs(model.flow(TIMES) - solved(model, False)).max() < 1e-8
    assert np.abs(model.linearized_flow(TIMES) - solved(model, True)).max() < 1e-8
    assert np.abs(model.printed_linearized_flow(TIMES) - solved(model, True)).max() > 0.01


def test_a_mode_without_label_decays():
    X = np.diag([3.0, 2.0, 1.0])
    model = theory.quadratic_model(X, np.array([1.0, 0.0, 2.0]), scale=0.5)
    assert model.target[1] == 0
    assert np.abs(model.flow(TIMES) - solved(model, False)).max() < 1e-8
    assert model.flow(np.array([1e6]))[0, 1] == pytest.approx(1 / (2 * 4 * 1e6), rel=1e-5)


def test_the_basis_is_one():
    X, y = random_data(3)
    model = theory.quadratic_model(X, y)
    np.testing.assert_allclose(model.V.T @ model.V, np.eye(7), atol=1e-12)
    assert model.rank == 5
    assert (model.target[:5] >= 0).all()
    np.testing.assert_allclose(model.outputs(model.target), y, atol=1e-10)  # the labels can be fitted
    np.testing.assert_allclose(model.V.T @ (X.T @ y), model.speeds, atol=1e-10)
    assert (model.flow(TIMES)[:, 5:] == model.start[5:]).all()


def test_starts_of_the_linearized_model():
    model = theory.quadratic_model(*random_data(0), scale=0.2)
    w0 = np.sqrt(2 * model.start)
    np.testing.assert_allclose(model.linearized_parameters(w0), model.start)
    np.testing.assert_allclose(model.printed_linearized_parameters(w0), 2 * model.start)
    h = 1e-6
    slope = ((w0 + h) ** 2 / 2 - (w0 - h) ** 2 / 2) / (2 * h)
    np.testing.assert_allclose(model.linearized_parameters(w0 + 1) - model.start, slope, rtol=1e-8)


@pytest.mark.parametrize("flow", ["flow", "linearized_flow"])
def test_times_are_when_modes_are_near_their_ends(flow):
    model = theory.order_reversal(np.array([4.0, 3.0, 2.0]), scale=0.2)
    times = model.exact_times(0.05) if flow == "flow" else model.exact_linearized_times(0.05)
    reached = np.diagonal(getattr(model, flow)(times))
    np.testing.assert_allclose(model.target - reached, 0.05, rtol=1e-9)
    small = theory.order_reversal(np.array([4.0, 3.0, 2.0]), scale=2e-5)
    np.testing.assert_allclose(small.times(1e-5), small.exact_times(1e-5), rtol=1e-4)
    np.testing.assert_allclose(small.linearized_times(1e-5), small.exact_linearized_times(1e-5), rtol=1e-4)
    assert (small.printed_times(1e-5) > 1.8 * small.exact_times(1e-5)).all()
    assert (small.printed_linearized_times(1e-5) > 1.8 * small.exact_linearized_times(1e-5)).all()


def test_ratios_of_times():
    model = theory.order_reversal(np.array([8.0, 4.0, 2.0, 1.0]), scale=1e-14)
    exact, linear = model.exact_times(1e-7), model.exact_linearized_times(1e-7)
    assert exact[0] / exact[3] == pytest.approx(model.ratio_of_times(0, 3), rel=0.25)
    assert model.printed_ratio_of_times(0, 3) == pytest.approx(1 / 8)
    assert linear[0] / linear[3] == pytest.approx(model.linearized_ratio_of_times(0, 3), rel=0.3)


@pytest.mark.parametrize("scale", [1e-6, 1e-10])
def test_modes_one_after_the_other(scale):
    """Against the flow at the time it is about; r = 3, 1, 0.6 and 0.2 of the mode k = 1."""
    X, speeds = np.eye(4), np.array([3.0, 1.0, 0.6, 0.2])
    model = theory.quadratic_model(X, speeds, scale=scale)
    k = int(np.flatnonzero(model.target[:4] == 1.0)[0])
    (truth,) = model.flow(model.exact_times(1e-3)[[k]])
    found = model.when_converged(k, 1e-3, scale)
    np.testing.assert_allclose(found, truth, rtol=2e-3, atol=1e-12)
    slow = int(np.flatnonzero(model.target[:4] == 0.6)[0])
    assert found[slow] < 0.25
    assert model.printed_when_converged(k, 1e-3, scale)[slow] > 0.5


def test_example_1_reverses_the_order():
    model = theory.order_reversal(np.array([9.0, 8.0, 7.0, 6.0, 5.0]))
    assert np.argsort(model.exact_times(0.01)).tolist() == [4, 3, 2, 1, 0]
    assert np.argsort(model.exact_linearized_times(0.01)).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("basis", ["lapack", "random", "aligned"])
def test_example_2_has_the_spectrum_of_the_text(basis):
    n, q, eta = 12, 3, 1.5
    model, clean = theory.label_noise(n, q, noise=eta, d=20, basis=basis, seed=4)
    np.testing.assert_allclose(model.mu[:n], [n + eta**2, *[eta**2] * (n - 1)])
    assert model.speeds[0] == pytest.approx(np.sqrt(n + eta**2) * (n - 2 * q) / np.sqrt(n))
    residual = 2 * eta * np.sqrt(q * (n - q) / n)
    assert np.linalg.norm(model.speeds[1:]) == pytest.approx(residual)
    if basis == "aligned":
        np.testing.assert_allclose(model.speeds[1:3], [residual, 0], atol=1e-9)
    assert int(clean.sum()) == n - q
    np.testing.assert_allclose(model.outputs(model.target), model.y, atol=1e-9)
    np.testing.assert_allclose(model.V.T @ model.V, np.eye(20), atol=1e-9)


def test_random_bases_differ_by_their_seed():
    one, same, other = (theory.label_noise(basis="random", seed=s, d=25).model.target for s in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 0.01


def test_example_3_does_not_depend_on_the_basis():
    flows = [theory.spurious_feature(basis=b, d=25).model for b in ("lapack", "random", "aligned")]
    outputs = [model.outputs(model.flow(TIMES)) for model in flows]
    assert np.abs(outputs[0] - outputs[1]).max() < 5e-3  # modes without labels move a little, by their basis
    assert np.abs(outputs[0] - outputs[2]).max() < 5e-3


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: theory.label_noise(basis="lapck"), NameLookupError),
        (lambda: theory.label_noise(n=4, q=2, basis="lapack"), InputError),
        (lambda: theory.spurious_feature(n=20, d=21), InputError),
        (lambda: theory.order_reversal(np.array([1.0, 2.0])), InputError),
        (lambda: theory.quadratic_model(np.eye(2), np.array([1.0, np.nan])), InputError),
        (lambda: theory.quadratic_model(np.eye(2), np.ones(2), scale=0.0), InputError),
        (lambda: theory.quadratic_model(np.eye(2), np.ones(2), scale=0.1).exact_times(2.0), InputError),
    ],
)
def test_bad_input(call, error):
    with pytest.raises(error, match=WORDED):
        call()


def test_modes_without_labels_never_come():
    model, _ = theory.label_noise(basis="aligned")
    times = model.times(1e-3)
    assert np.isposinf(times[2:]).all()
    assert np.isfinite(times[:2]).all()
    assert (model.linearized_times(1e-4)[2:] > 0).all()


def test_rounding_of_the_data_makes_no_modes():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((6, 2)) @ rng.standard_normal((2, 5))
    y = rng.standard_normal(6)
    exact, rounded = (theory.quadratic_model(X.astype(kind), y.astype(kind)) for kind in (np.float64, np.float32))
    assert exact.rank == rounded.rank == 2
    assert rounded.target[:2] == pytest.approx(exact.target[:2], rel=1e-4)
