"""Teachers, students and what they learn: laws of the inputs, the distance of features, trainings that break off."""

import math

import jaxtyping
import pytest
import torch
from torch import nn

from layerwise.foundations.errors import InputError
from layerwise.foundations.random import stream
from layerwise.studies.feature_learning import networks, teacher
from layerwise.studies.feature_learning.features import feature_distance, gradient_outer_product
from layerwise.studies.feature_learning.members import MEMBERS, member, members
from layerwise.studies.feature_learning.networks import learn, transfer
from layerwise.studies.feature_learning.teacher import Network, draw_task, other_task

SMALL = Network(dx=8, k=2, dy=3, dh=8, condition=10, batch=64)


@pytest.mark.parametrize("law", teacher.LAWS)
def test_inputs_have_the_covariance_of_the_task(law):
    task = draw_task(Network(dx=6, k=2, dy=3, condition=100, law=law), 0)
    x = task.inputs(200_000, stream(0, "test"))
    assert torch.allclose(x.mT @ x / len(x), task.root @ task.root, atol=0.03)
    assert x.mean(0).abs().max() < 0.02
    assert torch.linalg.cond(task.root @ task.root) == pytest.approx(100, rel=1e-9)


def test_laws_differ_in_their_fourth_moments():
    """3 for Gaussian entries, 1 for signs, 9/5 for uniform ones, 5 for the sparse law."""
    found = {name: law(400_000, 1, stream(1, "law")).pow(4).mean().item() for name, law in teacher.LAWS.items()}
    assert found == pytest.approx({"gaussian": 3, "rademacher": 1, "uniform": 1.8, "sparse": 5}, rel=0.03)


def test_tasks_share_features_alone():
    task = draw_task(SMALL, 0)
    other = other_task(task, 0)
    assert torch.equal(task.G, other.G)
    assert not torch.allclose(task.root, other.root)
    assert not torch.allclose(task.F, other.F)
    assert torch.allclose(task.G @ task.G.mT, torch.eye(2, dtype=torch.float64))


def test_outer_product_equals_jacobians():
    model, x = SMALL.student(0), torch.randn(5, 8, dtype=torch.float64)
    expected = sum(J.mT @ J for J in (torch.func.jacrev(model)(each) for each in x)) / 5
    assert torch.allclose(gradient_outer_product(model, x), expected)


def test_distance_of_the_teacher_itself_is_zero_and_of_another_is_not():
    task = draw_task(SMALL, 0)
    x = task.inputs(500, stream(0, "x"))

    def copy(G, F):
        model = Network(dx=8, k=2, dy=3, dh=2).student(0)
        with torch.no_grad():
            model[0].weight.copy_(G)
            model[2].weight.copy_(F)
        return model

    assert feature_distance(copy(task.G, task.F), x, task.G) < 1e-9
    assert feature_distance(copy(torch.eye(8, dtype=torch.float64)[:2], task.F), x, task.G) > 0.3
    broken = copy(task.G, task.F)
    nn.init.constant_(broken[0].weight, torch.nan)
    assert feature_distance(broken, x, task.G) == 1.0
    assert transfer(copy(task.G, task.F), other_task(task, 0), seed=0) < 1e-3


@pytest.mark.parametrize("name", MEMBERS)
def test_every_member_learns(name, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # hundreds of steps: checked elsewhere
    rates = members(damping=1e-3, clip=1e-3)[name]
    network = Network(dx=8, k=2, dy=3, dh=8, condition=10, batch=16) if name == "ngd" else SMALL
    runs = [learn(network, rates, rate, steps=40, seed=0, every=20) for rate in rates.rates[1:3]]
    best = min(runs, key=lambda found: found.score)
    assert best.steps == [0, 20, 40]
    assert best.loss[-1] < 0.7 * best.loss[0]
    assert best.dist[-1] < best.dist[0]
    assert math.isfinite(best.transfer)


def test_same_seed_same_numbers():
    runs = [learn(SMALL, member("kfac"), 0.1, steps=10, seed=3, every=5) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0] != learn(SMALL, member("kfac"), 0.1, steps=10, seed=4, every=5)


def test_training_that_breaks_off_counts_as_lost():
    lost = learn(SMALL, member("sgd"), 1e9, steps=60, seed=0, every=10)
    assert lost.steps == list(range(0, 61, 10))  # as long as a sound one
    assert (lost.dist[-1], lost.loss[-1]) == (1.0, math.inf)
    assert lost.score == lost.transfer == math.inf


@pytest.mark.parametrize("name", ["sgd", "adam", "soap", "foof", "kfac", "ekfac", "mahalanobis"])
def test_measuring_does_not_train(name, monkeypatch):
    """Test inputs must not reach the statistics of an optimizer that watches its model."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    often, once = (learn(SMALL, member(name), 0.03, steps=12, seed=3, every=every) for every in (1, 12))
    assert often.loss[-1] == once.loss[-1]
    assert often.dist[-1] == once.dist[-1]


def test_what_is_reported_is_what_is_said(monkeypatch):
    """Loss, score and transfer of a student that is the teacher, up to what they leave."""
    task = draw_task(SMALL, 0)

    def exact(self, seed):
        model = Network(dx=8, k=2, dy=3, dh=2)._student()
        with torch.no_grad():
            model[0].weight.copy_(task.G)
            model[2].weight.copy_(task.F)
        return model

    monkeypatch.setattr(Network, "student", exact)
    found = learn(SMALL, member("sgd"), 1e-12, steps=1, seed=0, every=1)
    assert found.loss[-1] < 1e-12
    assert found.score == pytest.approx(3 * 0.1**2 / 2, rel=0.1)  # the noise's half
    assert found.transfer < 1e-3


def test_loss_is_half_the_square():
    task = draw_task(SMALL, 0)
    x = task.inputs(4000, stream(0, "networks", "test"))
    with torch.no_grad():
        expected = (SMALL.student(0)(x) - task.clean(x)).square().sum(1).mean() / 2
    assert learn(SMALL, member("sgd"), 0.1, steps=1, seed=0).loss[0] == pytest.approx(float(expected), rel=1e-12)


def test_transfer_is_to_another_task(monkeypatch):
    seen = []
    monkeypatch.setattr(networks, "transfer", lambda model, task, seed: seen.append(task) or 0.5)
    assert learn(SMALL, member("sgd"), 0.1, steps=1, seed=0).transfer == 0.5
    assert torch.equal(seen[0].root, other_task(draw_task(SMALL, 0), 0).root)


def test_student_is_that_of_its_seed():
    first, again, other = (SMALL.student(seed)[0].weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_clip_is_for_those_that_are_clipped_by_default():
    clipped = {
        name for name, each in members(clip=1e-5).items() if each.make(SMALL.student(0), 0.1)._clip.kind is not None
    }
    assert clipped == {"kfac", "ekfac", "mahalanobis", "ngd"}
    assert not any(each.make(SMALL.student(0), 0.1)._clip.kind for each in members().values())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"law": "gausian"}, "gaussian"),
        ({"k": 9}, "k=9"),
        ({"depth": 1}, "depth=1"),
        ({"condition": 0.5}, "condition=0.5"),
        ({"condition": math.inf}, "condition=inf"),
        ({"k": 3, "dx": 3}, "k < dx"),
        ({"noise": -1.0}, "noise=-1.0"),
    ],
)
def test_settings_that_are_none_are_refused(options, says):
    with pytest.raises(InputError, match=says):
        Network(**({"dx": 8, "k": 2, "dy": 3, "dh": 8} | options))


def test_unknown_member_is_answered_with_the_nearest():
    with pytest.raises(InputError, match="kfac"):
        member("kfca")


def test_members_that_invert_say_so():
    """The flag is what claims are grouped by: true of those whose step shrinks as inputs grow."""
    x = torch.randn(64, 4, generator=stream(0, "x"), dtype=torch.float64)
    y = torch.randn(64, 2, generator=stream(0, "y"), dtype=torch.float64)
    for name, each in members(damping=1e-6).items():
        steps = []
        for scale in (1.0, 10.0):
            model = nn.Linear(4, 2, bias=False, dtype=torch.float64)
            nn.init.zeros_(model.weight)
            optimizer = each.make(model, 1.0)
            for _ in range(1 + (name == "soap")):  # SOAP's first step sets its basis only
                optimizer.zero_grad()
                ((model(scale * x) - y).square().sum() / 128).backward()
                optimizer.step()
            steps.append(model.weight.detach().norm())
        power = float(torch.log10(steps[1] / steps[0]))
        # ∇ ~ s; with Q⁻¹ ~ s⁻² the step goes as 1/s, or 1/s² with P^-½ UVᵀ Q^-½ scaled by tr S: always below s⁰.
        assert (power < -0.5) == each.inverts_inputs, (name, power)
