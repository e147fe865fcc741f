"""Measurements against what they are estimates of: dense matrices, closed forms, the loss itself."""

import itertools
import math

import pytest
import torch
from torch import nn

import layerwise as lw
from layerwise.doctor.clock import Clock
from layerwise.doctor.examination import Examination
from layerwise.doctor.measure.activations import ActivationWatch, run_watched, twins
from layerwise.doctor.measure.steps import Line, direction
from layerwise.foundations.vectors import ParamVector
from layerwise.layers.capture.model_call import call
from layerwise.layers.capture.recorder import Batch, ModelRecorder
from layerwise.layers.table import LayerTable


def network(*widths: int, nonlinearity: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nonlinearity()]
    return nn.Sequential(*layers[:-1])


@pytest.fixture(scope="module")
def task():
    torch.manual_seed(0)
    x = torch.randn(600, 6)
    return network(6, 10, 3), x, (x[:, :3] + 0.5 * x[:, 3:]).argmax(1)


@pytest.fixture(scope="module")
def layers(task):
    model, x, y = task
    return {layer.name: layer for layer in lw.doctor(model, (x, y), members=()).measured.layers}


def line(model: nn.Module, x: torch.Tensor, y: torch.Tensor, likelihood: lw.likelihoods.Likelihood) -> Line:
    recorder, batch = ModelRecorder(model, LayerTable.from_model(model)), Batch(x, y, None, 0)
    recorder.prepare(batch)
    return Line(model, recorder, likelihood, [batch])


# --- layers ------------------------------------------------------------------------------------------------------


def test_sides_are_spectra_of_second_moments(task, layers):
    model, x, _ = task
    hidden = torch.cat([model[:2](x), torch.ones(len(x), 1)], 1).detach()
    moment = (hidden.mT @ hidden / len(x)).double()
    values = torch.linalg.eigvalsh(moment)
    side = layers["2"].inputs
    assert side.condition == pytest.approx(float(values[-1] / values[0]), rel=1e-3)
    assert side.effective_rank == pytest.approx(float(lw.effective_rank(moment, centering="none")), rel=1e-4)
    assert side.top_share == pytest.approx(float(values[-1] / values.sum()), rel=1e-4)
    assert side.rms == pytest.approx(float(hidden.square().mean().sqrt()), rel=1e-4)
    assert (side.size, side.rows) == (11, 600)


def test_kronecker_error_is_that_of_the_exact_block(task, layers):
    """Within four standard errors of the error between the layer's exact Fisher matrix and its exact factors."""
    model, x, y = task
    exact, factors = (lw.fisher(model, (x, y), structure=how, estimator="exact") for how in ("block", "kfac"))
    for name in ("0", "2"):
        block, kfac = (F.layer(name).to_dense() for F in (exact, factors))
        truth = float((block - kfac).norm() / block.norm())
        layer = layers[name]
        assert layer.kronecker_error_se < 0.1
        assert abs(layer.kronecker_error - truth) < 4 * layer.kronecker_error_se, (name, layer.kronecker_error, truth)


def test_curvature_shares_are_those_of_the_exact_trace(task, layers):
    model, x, y = task
    exact = lw.fisher(model, (x, y), structure="diag", estimator="exact")
    for name in ("0", "2"):
        share = float(exact.operators[name].trace() / exact.trace())
        assert layers[name].curvature_share == pytest.approx(share, abs=0.06)
    assert sum(layer.curvature_share for layer in layers.values()) == pytest.approx(1.0)


def test_noise_scale_is_that_of_per_example_gradients(task, layers):
    model, x, y = task
    moment = lw.gradient_moment(model, (x, y), likelihood="categorical", structure="diag")
    mean = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), model[2].parameters())
    square = sum(float(g.square().sum()) for g in mean)
    total = float(moment.operators["2"].trace())
    assert layers["2"].gradient_norm == pytest.approx(math.sqrt(square), rel=1e-4)
    assert layers["2"].noise_scale == pytest.approx((total - square) / square, rel=0.1)


def test_rank_one_gradients():
    torch.manual_seed(0)
    one = torch.randn(1, 6)
    report = lw.doctor(network(6, 8, 2), (one.repeat(64, 1), torch.randn(64, 2)), members=())
    assert report.measured.layers[0].gradient_top_share == pytest.approx(1.0)
    assert report.measured.layers[0].inputs.top_share == pytest.approx(1.0)


def test_reach_of_least_squares_is_all_there_is():
    """A linear model under a square loss is its own quadratic model: a step with its curvature goes to the minimum."""
    torch.manual_seed(0)
    x = torch.randn(2000, 5) * torch.tensor([1.0, 1.0, 0.1, 1.0, 3.0])
    y = x @ torch.randn(5, 2) + 0.3 * torch.randn(2000, 2)
    model = nn.Linear(5, 2)
    (layer,) = lw.doctor(model, (x, y), "gaussian", members=()).measured.layers
    columns = torch.cat([x, torch.ones(2000, 1)], 1)
    best = 0.5 * (columns @ torch.linalg.lstsq(columns, y).solution - y).square().sum(1).mean()
    gap = 0.5 * (model(x).detach() - y).square().sum(1).mean() - best
    assert layer.reach == pytest.approx(float(gap), rel=0.05)
    assert layer.inputs.condition > 100


@pytest.mark.parametrize(("scale", "expected"), [(1.0, False), (0.01, True)])
def test_flat_directions_are_out_of_reach_of_gradient_descent(scale: float, expected: bool):
    """With one informative feature of size 0.01 beside large ones, a thousand steps do not get there."""
    torch.manual_seed(0)
    x = torch.randn(1000, 4) * torch.tensor([1.0, 1.0, 1.0, scale])
    y = x[:, 3:] / scale + 0.01 * torch.randn(1000, 1)
    (layer,) = lw.doctor(nn.Linear(4, 1, bias=False), (x, y), "gaussian", members=()).measured.layers
    assert (layer.out_of_reach > 0.5) == expected


# --- steps -------------------------------------------------------------------------------------------------------


def test_curvature_along_a_direction_is_that_of_the_dense_matrix(task):
    model, x, y = task
    d = ParamVector.randn(model, generator=1)
    dense = lw.fisher(model, (x, y), structure="dense", estimator="exact")
    assert line(model, x, y, lw.likelihoods.Categorical()).curvature(d) == pytest.approx(float(dense.quad(d)), rel=1e-4)


def test_the_quadratic_model_is_exact_for_least_squares():
    torch.manual_seed(0)
    x = torch.randn(512, 5)
    y = x @ torch.randn(5, 2) + torch.randn(512, 2)
    report = lw.doctor(nn.Linear(5, 2), (x, y), members=("SGD", "Muon", "KFAC"))
    assert len(report.measured.steps) == 3
    for step in report.measured.steps:
        assert step.measured == pytest.approx(step.predicted, rel=1e-3), step.name


def test_the_direction_of_sgd_is_the_gradient(task):
    model, x, y = task
    at = line(model, x, y, lw.likelihoods.Categorical())
    d, gradient = direction(at, at.batches, "SGD"), at.gradient()
    assert float(d @ gradient / (d.norm() * gradient.norm())) == pytest.approx(1.0, abs=1e-4)
    assert float(d.norm() / gradient.norm()) == pytest.approx(1.0, rel=1e-2)


def test_own_step_is_that_of_the_optimizer(task):
    model, x, y = task
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    own = lw.doctor(model, (x, y), optimizer=opt, members=()).measured.own_step
    slow = lw.doctor(
        model, (x, y), optimizer=torch.optim.SGD(model.parameters(), lr=0.05), members=()
    ).measured.own_step
    assert (own.name, own.rate, own.missing) == ("SGD", 0.5, ())
    assert slow.best_multiple == pytest.approx(10 * own.best_multiple, rel=1e-2)
    assert own.predicted > slow.predicted > 0
    assert own.measured == pytest.approx(own.predicted, rel=0.2)


# --- units, signals, data ----------------------------------------------------------------------------------------


class Functional(nn.Module):
    """A nonlinearity that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 10), nn.Linear(10, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


@pytest.mark.parametrize("kind", ["module", "function"])
def test_dead_units_are_seen_in_modules_and_functions(kind: str):
    torch.manual_seed(0)
    model = Functional() if kind == "function" else network(4, 10, 2, nonlinearity=nn.ReLU)
    first = model.up if isinstance(model, Functional) else model[0]
    with torch.no_grad():
        first.bias[:7] = -100.0
    watch = ActivationWatch()
    run_watched(model, watch, call, torch.randn(64, 4))
    (site,) = watch.measured_sites()
    assert (site.function, site.units, site.dead) == ("relu", 10, pytest.approx(0.7))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_saturation_is_a_small_derivative():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid())
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.copy_(torch.tensor([0.0, 1.0, 8.0, -8.0]))
    watch = ActivationWatch()
    run_watched(model, watch, call, torch.randn(32, 3))
    (site,) = watch.measured_sites()
    assert site.saturated == pytest.approx(0.5)
    slopes = torch.sigmoid(torch.tensor([0.0, 1.0, 8.0, 8.0]))
    assert site.mean_derivative == pytest.approx(float((slopes * (1 - slopes)).mean()), rel=1e-4)


@pytest.mark.parametrize(("scale", "collapsed"), [(0.1, 0.0), (100.0, 1.0)])
def test_attention_collapses_where_scores_are_large(scale: float, collapsed: float):
    class Attend(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(scale * x, x, x, is_causal=True)

    torch.manual_seed(0)
    watch = ActivationWatch()
    run_watched(Attend(), watch, call, torch.randn(2, 3, 16, 8))
    (attention,) = watch.measured_attention()
    assert (attention.heads, attention.collapsed) == (3, collapsed)


def test_twins_are_equal_rows():
    layer = nn.Linear(3, 6)
    with torch.no_grad():
        layer.weight[2:] = layer.weight[0]
        layer.bias[2:] = layer.bias[0]
    assert twins(layer) == pytest.approx(5 / 6)


def test_targets_and_inputs(task):
    _, x, y = task
    model = nn.Sequential(nn.Linear(6, 3))
    measured = lw.doctor(model, (torch.cat([10 * x[:, :5], torch.ones(600, 1)], 1), y), members=()).measured
    counts = torch.bincount(y).double() / 600
    assert measured.targets.entropy == pytest.approx(float(-(counts * counts.log()).sum()))
    assert measured.targets.largest_class == pytest.approx(float(counts.max()))
    assert measured.inputs.constant == pytest.approx(1 / 6)
    assert measured.inputs.largest_std == pytest.approx(float(10 * x[:, :5].std(0).max()), rel=1e-4)


def test_shuffled_targets_are_told_from_related_ones(task):
    model, x, y = task
    related = lw.doctor(model, (x, y), members=()).measured.targets.shuffled_z
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1))
    shuffled = lw.doctor(model, (x, y[order]), members=()).measured.targets.shuffled_z
    assert related > 6
    assert abs(shuffled) < 3


def test_alignment_by_layer_is_cka_of_the_tangent_kernel(task):
    model, x, y = task
    x, y = x[:100], y[:100]
    measured = lw.doctor(model, (x, y), members=()).measured
    order = Examination(model, (x, y), None, {}, None, Clock(60.0), None, None, 0).first.x
    assert torch.equal(order, x)
    kernels = lw.ntk(model, x).per_layer()
    for layer in measured.layers:
        assert layer.alignment == pytest.approx(float(lw.cka(kernels[layer.name], y)), rel=1e-3)


class Padded(nn.Module):
    """Forward mode forgets padding, so that products J v are by two backwards through a graph that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.head = nn.Embedding(6, 3, padding_idx=0), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.hidden(self.words(x)).tanh().mean(1))


def test_steps_of_several_members_share_a_graph():
    """Trying a member's step changes weights and puts them back: the graph of before is still right."""
    torch.manual_seed(0)
    data = torch.randint(6, (8, 3)), torch.randint(2, (8,))
    model = Padded()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    found = lw.doctor(model, data, "categorical", optimizer=opt, members=("SGD", "Adam"), seconds=600)
    assert {step.name for step in found.measured.steps} == {"SGD", "Adam"}
    assert not [note for note in found.measured.notes if "not measured" in note]
