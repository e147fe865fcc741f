"""Tracker: it measures what `lw.ntk` says, on its grid, and the training does not notice."""

import io
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import layerwise as lw
from layerwise.foundations.errors import InputError
from layerwise.regimes import Snapshots, Tracker
from layerwise.training import Budget, Problem, tensor_batches, train


def data(n: int = 24, features: int = 6, classes: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, features, generator=generator), torch.randint(classes, (n,), generator=generator)


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)
        )


def trained(make, tracked: bool = True, steps: int = 8, device: str = "cpu"):
    """A loop with dropout, batch norm and momentum; the model, its gradients, and torch's next draw."""
    model, (x, y) = network().to(device), (part.to(device) for part in data())
    opt = make(model)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        tracker = Tracker(model, {"train": (x, y), "test": data(seed=1)}, every=3)
        for step in range(steps):
            if tracked:
                tracker(step)
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if tracked and step % 3 == 1:  # between the backward and the update, too
                tracker.record(step)
            opt.step()
        return model, [p.grad for p in model.parameters()], torch.rand(3, device=device), tracker


@pytest.mark.parametrize(
    "make",
    [
        lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
        lambda m: lw.optim.KFAC(m, lr=0.01),
        lambda m: lw.optim.SOAP(m, lr=0.01),
    ],
    ids=["sgd", "kfac", "soap"],
)
def test_a_training_does_not_notice(make, device: str):
    with_it, gradients, draw, tracker = trained(make, device=device)
    without, others, other_draw, _ = trained(make, tracked=False, device=device)
    assert len(tracker.series()["step"]) == 6
    assert torch.equal(draw, other_draw)
    for (name, a), b in zip(with_it.state_dict().items(), without.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


def test_modes_gradients_and_hooks_are_left():
    model, (x, y) = network(), data()
    model.train()
    model[1].eval()  # frozen statistics
    hook = model[4].register_forward_hook(lambda *_: None)
    before = {name: list(m._forward_hooks) for name, m in model.named_modules()}
    Tracker(model, (x, y))(0)
    assert [m.training for m in model.modules()] == [True, True, False, True, True, True, True, True]
    assert before == {name: list(m._forward_hooks) for name, m in model.named_modules()}
    assert all(p.grad is None for p in model.parameters())
    hook.remove()


def test_kernels_are_those_of_eval_mode_and_measures_those_of_the_library():
    model, (x, y) = network().train(), data()
    for _ in range(3):
        model(x)  # running statistics that are not those of the batch
    tracker = Tracker(model, {"test": (x, y)}, ranks=(2, 10))
    found = tracker(0)
    assert model.training
    K = lw.ntk(model.eval(), x)
    spectrum = lw.spectrum(K)
    expected = {
        "cka": lw.cka(K, y),
        "effective_rank": lw.effective_rank(K),
        "eigenvalue/max": spectrum.max(),
        "eigenvalue/mean": spectrum.mean(),
        "eigenvalue/median": spectrum.median(),
        "trace_ratio/2": lw.trace_ratio(K, 2),
        "trace_ratio/10": lw.trace_ratio(K, 10),
    } | {f"cka/{name}": lw.cka(part, y) for name, part in K.per_layer().items()}
    assert set(found) == {f"test/{name}" for name in expected}
    for name, value in expected.items():
        assert found[f"test/{name}"] == pytest.approx(float(value), rel=1e-4, abs=1e-9), name
    assert len(K.per_layer()) >= 3


def test_centring_and_parts_that_are_not_asked_for():
    model, (x, y) = network().eval(), data()
    K = lw.ntk(model, x)
    found = Tracker(model, (x, y), centering="global", layers=False, spectrum=False)(0)
    assert found == {"cka": pytest.approx(float(lw.cka(K, y, centering="global")), rel=1e-4)}
    both = Tracker(model, (x, y), other_centerings=("global", "none"), layers=False, spectrum=False)(0)
    assert both["cka"] == pytest.approx(float(lw.cka(K, y)), rel=1e-4)
    assert both["cka-global"] == pytest.approx(found["cka"], rel=1e-4)
    assert both["cka-none"] == pytest.approx(float(lw.alignment(K, y)), rel=1e-4)
    unlabelled = Tracker(model, x)(0)
    assert unlabelled["effective_rank"] == pytest.approx(float(lw.effective_rank(K)), rel=1e-4)
    assert not any(name.startswith("cka") for name in unlabelled)
    few = Tracker(model, (x, y), examples=7, spectrum=False)(0)
    assert few["cka"] == pytest.approx(float(lw.cka(lw.ntk(model, x[:7]), y[:7])), rel=1e-4)


def test_a_trace_ratio_of_all_eigenvalues_is_one():
    model = nn.Linear(3, 1)
    assert Tracker(model, torch.randn(5, 3), ranks=(40,))(0)["trace_ratio/40"] == pytest.approx(1.0)


def test_the_grid_of_the_thesis():
    grid = Snapshots()
    expected = {0} | {5 * math.floor(1.15**k) for k in range(80)}
    assert {step for step in range(20_000) if grid.due(step)} == {step for step in expected if step < 20_000}
    assert [step for step in range(40) if Snapshots(2, 3).due(step)] == [0, 2, 6, 18]
    tracker = Tracker(nn.Linear(2, 1), torch.randn(4, 2))
    for step in range(101):
        tracker(step)
    assert tracker.series()["step"] == sorted(step for step in expected if step <= 100)


def test_a_step_is_measured_once_and_steps_grow():
    model, (x, y) = network(), data()
    tracker = Tracker(model, (x, y), every=2, layers=False)
    assert tracker(1) == {}
    first = tracker(2)
    assert tracker.record(2) == first
    before = tracker.series()
    with pytest.raises(InputError, match="steps that grow"):
        tracker(0)
    assert tracker.series() == before == {"step": [2]} | {name: [value] for name, value in first.items()}


def test_a_probe_is_kept_as_it_was():
    model, (x, y) = network(), data()
    tracker, again = Tracker(model, (x, y), spectrum=False), Tracker(model, (x.clone(), y.clone()), spectrum=False)
    x.zero_()
    assert tracker(0) == pytest.approx(again(0))


def test_in_the_training_loop():
    x, y = data(40)
    problem = Problem(
        name="toy",
        model=lambda seed: network(seed),
        batches=tensor_batches({"train": (x, y)}, batch_size=10),
        budget=Budget(steps=13),
    )

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    tracker = Tracker(None, {"train": (x, y)}, every=5, layers=False)
    done = train(problem, make, seed=3, measures=[(tracker.every, tracker)])
    plain = train(problem, make, seed=3, measures=[])
    assert tracker.series()["step"] == [0, 5, 10, 13]  # and the last step
    assert done.recorder.series()["train/cka"] == tracker.series()["train/cka"]
    for a, b in zip(done.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(InputError, match="of one model, and a training of another"):
        Tracker(network(), (x, y))(SimpleNamespace(step=0, model=network()))


def test_sinks_and_the_live_line():
    class Sink(list):
        closed = False

        def add(self, step, values):
            self.append((step, values))

        def close(self):
            self.closed = True

    model, (x, y) = network(), data()
    sink, line = Sink(), io.StringIO()
    with Tracker(model, {"test": (x, y)}, every=1, sinks=[sink], live=line) as tracker:
        values = tracker(0)
        tracker(1)
    assert sink[0] == (0, values)
    assert [step for step, _ in sink] == [0, 1]
    assert sink.closed
    assert f"step 0  test: CKA {values['test/cka']:.3g}, effective rank" in line.getvalue()
    assert line.getvalue().count("\n") == 1


@pytest.mark.filterwarnings("ignore")
def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'layerwise[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from layerwise.training.tensorboard import TensorBoard

    model, (x, y) = network(), data()
    with Tracker(model, {"test": (x, y)}, every=1, sinks=[TensorBoard(tmp_path)], spectrum=False) as tracker:
        found = tracker(0)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("test/cka")] == [(0, pytest.approx(found["test/cka"]))]


@pytest.mark.parametrize(
    ("probe", "options", "message"),
    [
        (data(), {"every": 0}, "every=0"),
        (data(), {"every": True}, "every=True"),
        (data(), {"examples": 0}, "examples"),
        (data(), {"ranks": (0,)}, "ranks"),
        (data(), {"centering": "rows"}, "centering='rows'"),
        (data(), {"other_centerings": ("rows",)}, "centering='rows'"),
        ({}, {}, "some, each with a name"),
        (("x", "y"), {}, "inputs and labels"),
        ((data()[0], data()[1][:5]), {}, "as many of both"),
        ((torch.zeros(0, 6), torch.zeros(0, dtype=torch.long)), {}, "as many of both"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_settings(probe, options, message):
    with pytest.raises(InputError, match=message):
        Tracker(network(), probe, **options)


def test_bad_grids():
    for first, ratio in ((0, 1.15), (5, 1.0), (5, math.nan)):
        with pytest.raises(InputError, match="a ratio > 1"):
            Snapshots(first, ratio)


def test_a_snapshot_that_fails_leaves_the_model_and_the_record():
    model, (x, y) = network().train(), data()
    tracker = Tracker(model, {"good": (x, y), "bad": (x[:, :4], y)}, layers=False)
    with pytest.raises(Exception, match=r"shape|mat1"):
        tracker(0)
    assert tracker.series() == {"step": []}
    assert all(m.training for m in model.modules())
    labels = Tracker(model, (x, y + 9), layers=False)
    with pytest.raises(InputError, match="labels from"):
        labels(0)
    with pytest.raises(InputError, match="without a model"):
        Tracker(None, (x, y))(0)


def test_layers_that_are_unfrozen_later():
    """Their columns are as long as the others: NaN where there was no kernel."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    tracker = Tracker(model, (torch.randn(12, 4), torch.arange(12) % 3), every=1)
    tracker(0)
    model[0].requires_grad_(True)
    tracker(1)
    model[2].requires_grad_(False)
    tracker(2)
    series = tracker.series()
    assert {len(column) for column in series.values()} == {3}
    assert [math.isnan(value) for value in series["cka/0"]] == [True, False, False]
    assert [math.isnan(value) for value in series["cka/2"]] == [False, False, True]
