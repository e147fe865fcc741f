"""Trainings whose kernels are tracked, kernels on the square and the line, sensitivities: against plain sums."""

import math

import pytest
import torch
from torch import nn

import layerwise as lw
from error_sentences import WORDED
from layerwise.foundations.errors import InputError, NameLookupError, NumericalError
from layerwise.studies.tangent_alignment import centerings, classification, optimizers, sensitivity, square
from layerwise.studies.tangent_alignment.classification import Looks, Task, tracked, with_random_labels

pytest.importorskip("sklearn")
SMALL = Task(hidden=(16, 16), trained_on=300, steps=12)
LOOKS = Looks(examples=20, ratio=3, others=("global",))


# --- trainings -----------------------------------------------------------------------------------------------


def test_digits_are_divided_and_scaled():
    split = Task(trained_on=1400).split(3)
    assert split.x.shape == (1400, 1, 8, 8)
    assert split.held_x.shape == (397, 1, 8, 8)
    assert float(split.x.mean(0).abs().max()) < 1e-5
    assert float(split.x.std()) == pytest.approx(1, abs=1e-3)
    assert not split.random.any()
    other = Task(trained_on=1400).split(4)
    assert not torch.equal(split.y, other.y)
    assert sorted(torch.cat([split.y, split.held_y]).tolist()) == sorted(torch.cat([other.y, other.held_y]).tolist())


def test_random_labels_are_uniform_over_all_classes():
    y = torch.zeros(20_000, dtype=torch.long)
    labels, random = with_random_labels(y, 0.25, torch.Generator().manual_seed(0))
    assert int(random.sum()) == 5000
    assert not labels[~random].any()
    share = float((labels[random] == 0).double().mean())
    assert share == pytest.approx(0.1, abs=5 * math.sqrt(0.09 / 5000))
    clean, noisy = Task().split(0), Task(random_labels=0.5).split(0)
    assert torch.equal(clean.x, noisy.x)  # only labels differ
    assert torch.equal(clean.y[~noisy.random], noisy.y[~noisy.random])
    assert int(noisy.random.sum()) == 700


def test_networks_have_the_variance_of_he_and_no_biases():
    model = Task().model(0)
    layers = [m for m in model if isinstance(m, nn.Linear)]
    assert [layer.in_features for layer in layers] == [64, 80, 80, 80, 80, 80]
    for layer in layers[:-1]:
        assert float(layer.weight.detach().var()) * layer.in_features == pytest.approx(2, rel=0.1)
        assert not layer.bias.any()


def test_probes_have_the_labels_that_are_trained_on():
    split = Task(random_labels=0.2).split(1)
    found = classification.probes(split, ("train", "test", "easy", "difficult"), 100)
    own = {tuple(x.flatten().tolist()): int(y) for x, y in zip(split.x, split.y, strict=True)}
    for name in ("train", "easy", "difficult"):
        assert all(own[tuple(x.flatten().tolist())] == int(y) for x, y in zip(*found[name], strict=True))
    assert torch.equal(found["difficult"][0], split.x[split.random][:100])
    assert not any(torch.equal(a, b) for a in found["easy"][0][:20] for b in found["difficult"][0])
    with pytest.raises(InputError, match="examples=300"):
        classification.probes(split, ("difficult",), 300)


def test_tracked_measures_are_those_of_the_kernel_and_trainings_are_shared():
    series = tracked(SMALL, 5, LOOKS)
    assert tracked(SMALL, 5, LOOKS) is series
    assert series["step"] == [0, 5, 12]
    assert all(len(column) == 3 and all(map(math.isfinite, column)) for column in series.values())
    split, model = SMALL.split(5), SMALL.model(5)
    x, y = split.held_x[:20], split.held_y[:20]
    K = lw.ntk(model, x)
    assert series["test/cka"][0] == pytest.approx(float(lw.cka(K, y)), rel=1e-3)
    assert series["test/cka-global"][0] == pytest.approx(float(lw.cka(K, y, centering="global")), rel=1e-3)
    assert series["test/effective_rank"][0] == pytest.approx(float(lw.effective_rank(K)), rel=1e-3)
    train = lw.ntk(model, split.x[:20])
    assert series["train/cka"][0] == pytest.approx(float(lw.cka(train, split.y[:20])), rel=1e-3)
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(model(split.x), split.y))
    assert series["fit/loss"][0] == pytest.approx(loss, rel=1e-4)
    assert series["fit/loss"][-1] < loss


def test_a_training_that_diverges_is_an_error():
    with pytest.raises(NumericalError, match="smaller lr"):
        tracked(Task(hidden=(16,), trained_on=300, steps=12, lr=1e12), 0, Looks(examples=10, spectrum=False))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"images": "letters"}, NameLookupError),
        ({"network": "vgg19"}, InputError),
        ({"trained_on": 1790}, InputError),
        ({"random_labels": 1.5}, InputError),
    ],
)
def test_bad_tasks(options: dict, kind: type[Exception]):
    with pytest.raises(kind, match=WORDED):
        Task(**options)


@pytest.mark.parametrize("network", ["vgg11", "vgg19", "resnet18"])
def test_networks_for_larger_images(network: str):
    task = Task(images="cifar10", network=network, width=4)
    model = task.model(0)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    norms = any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert norms == (network == "resnet18")
    again = task.model(0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


# --- centerings ----------------------------------------------------------------------------------------------


def test_of_two_centerings_one_is_that_of_centred_features():
    model = Task(hidden=(8,)).model(0).double()
    found = centerings.readings(model, torch.randn(6, 1, 8, 8, dtype=torch.float64))
    assert found.corrected < 1e-12
    assert found.printed > 0.1


def test_features_are_gradients():
    model = nn.Linear(3, 2).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    phi = centerings.features(model, x)
    expected = lw.jacobian(model, x).to_dense().view(4, 2, -1)
    assert torch.allclose(phi, expected)


# --- the square and the line ---------------------------------------------------------------------------------


def test_half_of_the_square_is_in_the_disk():
    points = square.grid(201)
    assert float(square.in_disk(points).double().mean()) == pytest.approx(0.5, abs=0.01)
    assert points.min() == -1
    assert points.max() == 1


def test_looks_at_a_disk():
    disk = square.Disk(width=16, depth=3, points=40, side=5, lr=0.1, steps=(0, 3))
    first, last = disk.looks(0)
    assert (first.step, last.step) == (0, 3)
    assert last.loss < first.loss
    again, _ = disk.looks(0)
    assert again == first
    generator = lw.foundations.random.stream(0, "disk")
    torch.rand(40, 2, generator=generator)
    K = lw.ntk(square.network(2, 16, 3, generator, torch.float32), square.grid(5))
    label = 2 * square.in_disk(square.grid(5)).double() - 1
    values = torch.linalg.eigvalsh(K.matrix().double()).flip(0)
    assert first.ratio == pytest.approx(float(values[19] / values[0]), rel=1e-2, abs=1e-7)
    assert first.cka == pytest.approx(float(lw.cka(K, label)), rel=1e-4)
    assert first.effective_rank == pytest.approx(float(lw.effective_rank(K)), rel=1e-3)
    assert first.largest == pytest.approx(float(lw.spectrum(K).max()), rel=1e-4)


def test_correlations():
    label = torch.tensor([1.0, 1.0, -1.0, -1.0])
    u = torch.stack([-3 * label + 7, torch.tensor([1.0, -1.0, 1.0, -1.0])], 1)
    assert square.correlations(u, label).tolist() == pytest.approx([1.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("wrong", [{"steps": (5, 10)}, {"steps": (0,)}, {"depth": 1}, {"side": 2}], ids=str)
def test_bad_disks(wrong: dict):
    with pytest.raises(InputError, match=WORDED):
        square.Disk(**wrong)


def test_a_disk_that_diverges():
    with pytest.raises(NumericalError, match="smaller lr"):
        list(square.Disk(width=16, depth=3, points=20, side=5, lr=1e20, steps=(0, 5)).looks(0))


def test_modes_of_known_vectors():
    t = torch.arange(50, dtype=torch.float64) / 50
    vectors = torch.stack([torch.sin(2 * math.pi * k * t + 0.3) for k in (1, 4, 9)], 1)
    assert square.dominant(vectors).tolist() == [1, 4, 9]
    assert square.spearman([1.0, 3.0, 2.0, 4.0]) == pytest.approx(0.8)
    assert square.spearman([2.0, 1.0]) == pytest.approx(-1)
    assert square.inversions([1.0, 3.0, 2.0, 2.0, 1.0]) == 2


def test_without_biases_the_kernel_on_the_line_has_rank_three():
    values = square.line_modes(0, width=32, biases=False).eigenvalues
    assert float(values[3] / values[0]) < 1e-12
    assert float(square.line_modes(0, width=32).eigenvalues[3]) > 1e-6


# --- sensitivity ---------------------------------------------------------------------------------------------


def test_leading_directions_are_right_singular_vectors():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    values, directions, trace = sensitivity.leading_directions(model, x, 3)
    J = lw.jacobian(model, x).to_dense()
    _, s, V = torch.linalg.svd(J, full_matrices=False)
    flat = torch.cat([v.flatten(1) for v in directions.values()], 1)
    assert torch.allclose(values.sqrt(), s[:3])
    assert torch.allclose((flat @ V[:3].mT).abs(), torch.eye(3, dtype=torch.float64), atol=1e-6)
    assert float(trace) == pytest.approx(float(J.square().sum()))


def test_changes_are_those_of_the_linearization_for_short_steps():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    before = [p.detach().clone() for p in model.parameters()]
    found = sensitivity.sensitivity(model, x, x, directions=3, size=1e-6, seed=0)
    norm = math.sqrt(sum(float(p.square().sum()) for p in before))
    values, _, trace = sensitivity.leading_directions(model, x, 3)
    assert torch.allclose(found.leading, 1e-6 * norm * values.sqrt() / math.sqrt(6), rtol=1e-4)
    count = sum(p.numel() for p in before)
    assert torch.allclose(found.theory, (values / (trace / count)).sqrt())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_random_directions_have_norm_one_and_a_mean_square_that_theory_names():
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    x = torch.randn(7, 5, dtype=torch.float64)
    v = sensitivity.random_directions(model, 4000, torch.Generator().manual_seed(0))
    flat = torch.cat([part.flatten(1) for part in v.values()], 1)
    assert torch.allclose(flat.norm(dim=1), torch.ones(4000, dtype=torch.float64))
    J = lw.jacobian(model, x).to_dense()
    mean = float((flat @ J.mT).square().sum(1).mean())
    assert mean == pytest.approx(float(J.square().sum()) / flat.shape[1], rel=0.05)  # 4000 draws


def test_more_directions_than_outputs():
    with pytest.raises(InputError, match="at most"):
        sensitivity.leading_directions(nn.Linear(4, 2), torch.randn(3, 4), 7)


# --- optimizers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", optimizers.METHODS)
def test_snapshots_are_where_losses_are_first_reached(name: str):
    rate = 0.05 if name == "sgd" else 0.005
    found = optimizers.at_losses(Task(hidden=(16,), trained_on=200, steps=16), name, rate, (2.6, 2.3, 1e-9), 0, 10)
    series = found.series
    assert series["loss"][1:] == [2.6, 2.3]
    assert series["step"][0] == 0
    assert 0 < series["step"][1] <= series["step"][2] < 16
    assert all(reached <= asked for reached, asked in zip(series["fit/loss"], series["loss"], strict=True))
    assert "after 16 steps" in found.stopped
    assert len({len(column) for column in series.values()}) == 1
    assert {"cka", "cka/1", "effective_rank", "test/accuracy"} <= set(series)


def test_a_step_that_passes_several_losses_counts_for_all():
    found = optimizers.at_losses(Task(hidden=(16,), trained_on=200, steps=60), "sgd", 0.05, (99.0, 98.0, 1.5), 0, 10)
    series = found.series
    assert found.stopped == ""
    assert series["step"][:3] == [0, 1, 1]
    assert series["cka"][1] == series["cka"][2] != series["cka"][0]


def test_divergence_is_said():
    found = optimizers.at_losses(Task(hidden=(16,), trained_on=200, steps=60), "sgd", 1e20, (1e-3,), 0, 10)
    assert found.stopped
    assert found.series["step"] == [0]


def test_rates_are_chosen_by_as_many_trials():
    task = Task(hidden=(16,), trained_on=200, steps=10)
    for name in ("sgd", "adam"):
        choice = optimizers.chosen(task, name, (0.01, 0.0001), 3, (7, 8))
        assert len(choice.tried()) == 3
        assert len(choice.trials) == 6
        assert choice.options is not None
        assert choice.options["lr"] > (0.005 if name == "sgd" else 0.0005)
    with pytest.raises(NameLookupError, match="Did you mean"):
        optimizers.make("kfca")
