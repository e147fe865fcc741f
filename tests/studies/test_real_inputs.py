"""Real inputs: pixels, teacher, measures; and the head that is fitted on few examples, against definitions."""

import pytest
import torch
from torch import nn

from layerwise import optim
from layerwise.foundations.errors import InputError
from layerwise.studies.feature_learning import label_transfer as lt
from layerwise.studies.feature_learning import real_inputs as ri
from layerwise.studies.feature_learning.features import feature_distance, gradient_outer_product

pytest.importorskip("sklearn", reason="needs scikit-learn: pip install 'layerwise[data]'")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


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
    with pytest.raises(InputError, match="ask for fewer"):
        lt.few(target.y["train"], 50, 0, 0)
