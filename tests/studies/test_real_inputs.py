"""Real inputs: pixels, teacher, measures; and the head that is fitted on few examples, against definitions."""

import dataclasses

import pytest
import torch
from torch import nn

from layerwise import optim
from layerwise.foundations.errors import InputError
from layerwise.studies.feature_learning import label_transfer as lt
from layerwise.studies.feature_learning import real_inputs as ri
from layerwise.studies.feature_learning.features import feature_distance, gradient_outer_product
from layerwise.studies.feature_learning.members import members
from random_tensors import randn64 as normal

pytest.importorskip("sklearn", reason="needs scikit-learn: pip install 'layerwise[data]'")


@pytest.fixture(scope="module")
def pixels():
    return ri.scaled_pixels(ri.images("digits").flat())


# --- Inputs -------------------------------------------------------------------------------------------------


def test_pixels_keep_their_anisotropy(pixels):
    raw = ri.images("digits").flat().double()
    kept = raw.var(0, correction=0) > ri.LEAST * raw.var(0, correction=0).mean()
    torch.testing.assert_close(torch.corrcoef(pixels.mT), torch.corrcoef(raw[:, kept].mT))
    ratio = pixels.var(0) / raw[:, kept].var(0)
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))  # one common scale
    torch.testing.assert_close(pixels.mean(0), torch.zeros(pixels.shape[1]).double(), atol=1e-12, rtol=0)
    assert float(pixels.var(0, correction=0).mean()) == pytest.approx(1)


def test_pixels_that_never_vary_are_refused():
    with pytest.raises(InputError, match="all alike"):
        ri.scaled_pixels(torch.ones(5, 4))
    with pytest.raises(InputError, match="digits"):
        ri.images("digit")


@pytest.mark.parametrize("pool", [0, 9])
def test_pools_that_no_image_has_are_refused(pool):
    with pytest.raises(InputError, match="8 pixels of a side"):
        ri.images("digits", 3, pool=pool)


def test_pooling_averages_squares():
    torch.testing.assert_close(
        ri.images("digits", 3, pool=2).x[:, 0, 0, 1], ri.images("digits", 3).x[:, 0, :2, 2:4].mean((1, 2))
    )


# --- Known features -----------------------------------------------------------------------------------------


def test_the_teacher_labels_the_images(pixels):
    found = ri.known_features(pixels, 3, k=3, dy=5, noise=0.1)
    torch.testing.assert_close(found.G @ found.G.mT, torch.eye(3).double())
    inside = torch.tanh(found.held_x @ found.G.mT)
    head = torch.linalg.lstsq(inside, found.held_y).solution
    torch.testing.assert_close(inside @ head, found.held_y)
    residual = found.y - torch.tanh(found.x @ found.G.mT) @ head
    assert float(residual.std()) == pytest.approx(0.1, rel=0.05)
    together = torch.cat([found.x, found.held_x])
    torch.testing.assert_close(together.sort(0).values, pixels.sort(0).values)


def test_a_rotation_keeps_the_eigenvalues_and_mixes_the_pixels(pixels):
    plain, turned = (ri.known_features(pixels, 0, rotated=rotated) for rotated in (False, True))
    torch.testing.assert_close(ri.eigen_directions(plain.x)[0], ri.eigen_directions(turned.x)[0])
    spread = [float(x.var(0).max() / x.var(0).min()) for x in (plain.x, turned.x)]
    assert spread[1] < 0.2 * spread[0]


def test_distance_is_zero_for_the_teacher_and_one_for_the_overflowed(pixels):
    found = ri.known_features(pixels, 0)
    model = ri.network(pixels.shape[1], 4, 8)
    ri.hidden_weight(model).copy_(found.G)
    assert feature_distance(model, found.x, found.G) < 1e-7
    ri.hidden_weight(model).fill_(torch.inf)
    assert feature_distance(model, found.x, found.G) == 1.0
    assert ri.mean_loss(found.problem(4, 32), model, found.held_x, found.held_y) == torch.inf


@pytest.mark.parametrize("asked", [{"k": 0}, {"k": 54}, {"held": 0.0}, {"held": 1.0}])
def test_teachers_that_cannot_be_are_refused(pixels, asked):
    with pytest.raises(InputError, match="54 features.*53" if asked == {"k": 54} else "k=0|held="):
        ri.known_features(pixels, 0, **asked)


def test_a_loss_that_overflows_is_infinite(pixels):
    found = ri.known_features(pixels, 0)
    problem, model = found.problem(4, 32), ri.network(pixels.shape[1], 4, 8)
    list(model.parameters())[1].detach().fill_(1e200)  # outputs that are finite, with squares that are not
    outputs = model(found.held_x).detach()
    assert outputs.isfinite().all()
    assert float(problem.loss(outputs, found.held_y)) == torch.inf
    assert ri.mean_loss(problem, model, found.held_x, found.held_y) == torch.inf


def test_gradient_outer_product_by_differences():
    model, x, h = ri.network(4, 3, 2), normal(6, 4), 1e-6
    J = torch.stack([(model(x + h * e) - model(x - h * e)) / (2 * h) for e in torch.eye(4).double()], -1).detach()
    torch.testing.assert_close(gradient_outer_product(model, x), torch.einsum("nod,noe->de", J, J) / 6)


def test_movement_is_a_part_of_the_sum(pixels):
    values, directions = ri.eigen_directions(pixels)
    assert (values.diff() <= 0).all()
    end = normal(3, len(values))
    parts = ri.movement(torch.zeros_like(end), end, directions)
    assert float(parts.sum()) == pytest.approx(1)
    assert float(parts[0]) == pytest.approx(float((end @ directions[0]).square().sum() / end.square().sum()))
    assert sum(ri.in_thirds(parts)) == pytest.approx(1)


# --- Members ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kfac", "ekfac", "kfac-damped"])
def test_curvature_is_that_of_the_labels(name):
    make = ri.optimizer_of(name, "categorical")
    x, y = normal(64, 5), torch.arange(64) % 3
    problem = lt.Task(x={"train": x}, y={"train": y}, classes=3).problem(4, 64)
    assert isinstance(make(ri.network(5, 4, 3, nn.ReLU), 0.01), optim.EKFAC if name == "ekfac" else optim.KFAC)
    before, after = (ri.trained(problem, name, 0.01, seed=0, steps=steps) for steps in (0, 20))
    assert ri.mean_loss(problem, after, x, y) < ri.mean_loss(problem, before, x, y)


def stepped(make, labels=3):
    """The weights after two steps on labels, from one start."""
    model = ri.network(5, 4, labels)
    ri.hidden_weight(model).copy_(normal(4, 5, seed=7))
    list(model.parameters())[1].detach().copy_(normal(labels, 4, seed=8))
    optimizer, x, y = make(model, 0.1), normal(64, 5), torch.arange(64) % labels
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.mark.parametrize(
    ("name", "base", "damping"),
    [
        ("kfac", "kfac", 1e-4),
        ("ekfac", "ekfac", 1e-4),
        ("kfac-damped", "kfac", 0.1),
    ],
)
def test_a_member_has_the_likelihood_and_the_damping_of_its_name(name, base, damping):
    found = stepped(ri.optimizer_of(name, "categorical"))
    assert torch.equal(found, stepped(members(damping, "categorical")[base].make))
    assert not torch.allclose(found, stepped(ri.optimizer_of(name, "gaussian")), rtol=1e-3)
    assert not torch.allclose(found, stepped(members(1e-4 if damping == 0.1 else 0.1, "categorical")[base].make))


def test_a_training_that_breaks_off_counts_as_lost(pixels):
    """A batch without a finite loss comes last of three, so that the weights before it are finite."""
    known = ri.known_features(pixels, 0)
    whole = known.problem(4, 32)

    def broken(split, order):
        for number, (x, y) in enumerate(whole.batches(split, order)):
            yield x, torch.full_like(y, torch.inf) if number == 2 else y

    problem = dataclasses.replace(whole, batches=broken)
    two, lost = (ri.trained(problem, "sgd", 0.1, seed=0, steps=steps) for steps in (2, 5))
    assert feature_distance(two, known.x, known.G) < 1
    assert ri.mean_loss(whole, two, known.held_x, known.held_y) < torch.inf
    assert feature_distance(lost, known.x, known.G) == 1
    assert ri.mean_loss(whole, lost, known.held_x, known.held_y) == torch.inf
    start, end = ri.hidden_weight(two), ri.hidden_weight(lost)
    assert ri.movement(start, end, torch.eye(end.shape[1]).double()).isnan().all()
    classes = torch.arange(30) % 5
    task = lt.Task(x={s: normal(30, end.shape[1]) for s in lt.SPLITS}, y=dict.fromkeys(lt.SPLITS, classes), classes=5)
    assert lt.few_shot(task, 2, seed=0, draws=2, model=lost) == lt.accuracy(lost, task.x["test"], classes) == 0.2


def test_members_share_their_start():
    problem = lt.Task(x={"train": normal(64, 5)}, y={"train": torch.arange(64) % 3}, classes=3).problem(4, 16)
    a, b = (ri.trained(problem, name, 0.1, seed=1, steps=0) for name in ("sgd", "kfac"))
    assert torch.equal(ri.hidden_weight(a), ri.hidden_weight(b))


# --- Few examples -------------------------------------------------------------------------------------------


def brute_force(features, labels, test):
    """Predictions with the ridge whose leave-one-out error is least, by fitting n times."""
    Y = nn.functional.one_hot(labels).double()
    scale = float((features - features.mean(0)).square().sum(1).mean())

    def fit(X, Y, at, ridge):
        Z = X - X.mean(0)
        A = torch.linalg.solve(Z.mT @ Z + ridge * scale * torch.eye(Z.shape[1]).double(), Z.mT @ (Y - Y.mean(0)))
        return (at - X.mean(0)) @ A + Y.mean(0)

    def error(ridge):
        kept = [torch.arange(len(Y)) != i for i in range(len(Y))]
        return sum(float((fit(features[k], Y[k], features[~k], ridge) - Y[~k]).square().sum()) for k in kept)

    best = min(lt.RIDGES, key=error)
    return fit(features, Y, test, best).argmax(1), best


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ridge_is_chosen_by_leaving_one_out(seed):
    labels = torch.arange(20) % 4
    centres = normal(4, 6, seed=seed + 50)
    features = centres[labels] + 0.8 * normal(20, 6, seed=seed)
    test_labels = torch.arange(400) % 4
    test = centres[test_labels] + 0.8 * normal(400, 6, seed=seed + 99)
    predicted, best = brute_force(features, labels, test)
    assert lt.RIDGES[0] < best < lt.RIDGES[-1]
    expected = float((predicted == test_labels).double().mean())
    assert lt.ridge_accuracy(features, labels, test, test_labels) == expected


def test_scale_and_rotation_of_features_do_not_matter():
    labels, x, t = torch.arange(12) % 3, normal(12, 5), normal(60, 5, seed=1)
    turn = torch.linalg.qr(normal(5, 5, seed=2))[0]
    y = (t[:, 0] > 0).long()
    assert lt.ridge_accuracy(x, labels, t, y) == lt.ridge_accuracy(1e3 * x @ turn, labels, 1e3 * t @ turn, y)


def test_features_that_overflowed_are_worth_a_guess():
    labels, test = torch.arange(12) % 3, torch.arange(30) % 3
    x, t = torch.full((12, 5), torch.inf).double(), torch.zeros(30, 5).double()
    assert lt.ridge_accuracy(x, labels, t, test) == pytest.approx(1 / 3)


def test_splits_do_not_overlap_and_few_come_from_training():
    y = torch.arange(10).repeat(20)
    x = torch.arange(200)[:, None].double()
    target = lt.task(x, y, range(5, 10), 0)
    rows = torch.cat([part[:, 0] for part in target.x.values()])
    assert len(rows) == len(set(rows.tolist())) == 100
    assert torch.equal(y[target.x["test"][:, 0].long()] - 5, target.y["test"])
    assert target.y["train"][lt.few(target.y["train"], 3, 0, 0)].bincount().tolist() == [3] * 5
    assert not torch.equal(lt.few(target.y["train"], 3, 0, 0), lt.few(target.y["train"], 3, 0, 1))
    with pytest.raises(InputError, match="Ask for fewer"):
        lt.few(target.y["train"], 50, 0, 0)
    with pytest.raises(InputError, match="at least 1"):
        lt.few(target.y["train"], 0, 0, 0)


def test_few_images_or_labels_are_refused():
    y = torch.arange(8).repeat(10)
    with pytest.raises(InputError, match="no image with the label 8"):
        lt.task(torch.zeros(80, 3).double(), y, range(5, 10), 0)
    with pytest.raises(InputError, match="no image with the label 5"):
        lt.task(torch.zeros(0, 3).double(), torch.zeros(0).long(), range(5, 10), 0)
    with pytest.raises(InputError, match="every label among"):
        lt.task(torch.zeros(8, 3).double(), y[:8], range(5, 8), 0)


def apart(labels, wrong=0):
    """One-hot images of three classes, and their labels, all of them shifted by `wrong`."""
    return torch.eye(3).double()[labels], (labels + wrong) % 3


def test_few_shot_predicts_the_test_images():
    labels = torch.arange(30) % 3
    x, y = apart(labels)
    _, shifted = apart(labels, wrong=1)

    def accuracies(**ys):
        task = lt.Task(x=dict.fromkeys(lt.SPLITS, x), y=dict.fromkeys(lt.SPLITS, y) | ys, classes=3)
        model = ri.network(3, 3, 3, nn.ReLU)
        ri.hidden_weight(model).copy_(torch.eye(3))
        return [lt.few_shot(task, 2, seed=0, draws=3, model=m) for m in (None, model)]

    assert accuracies() == accuracies(held=shifted) == [1.0, 1.0]
    assert accuracies(test=shifted) == accuracies(train=shifted) == [0.0, 0.0]
    with pytest.raises(InputError, match="draws=0"):
        lt.few_shot(lt.Task(x={}, y={}, classes=3), 2, seed=0, draws=0)
