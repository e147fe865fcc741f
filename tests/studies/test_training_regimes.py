"""Stacked trainings against plain loops of `lw.linearized`, equal progress of logs, readers of photographs."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import layerwise as lw
from layerwise.data.folder import MissingDataError
from layerwise.foundations.errors import FileFormatError, InputError, NameLookupError
from layerwise.foundations.progress import Silent
from layerwise.foundations.random import stream
from layerwise.regimes.yin_yang import yin_yang, yin_yang_grid
from layerwise.studies.training_regimes import attributes, examples
from layerwise.studies.training_regimes.alone import Alone
from layerwise.studies.training_regimes.regimes import Regimes, falling, linearity, reached
from layerwise.studies.training_regimes.stack import Stack, cross_entropy, cross_entropy_gradient, drawn
from layerwise.studies.training_regimes.task import Run, Task
from layerwise.studies.training_regimes.together import Together
from layerwise.studies.training_regimes.yin_yang import YinYangRuns, regions, rings

SIZES = (4, 7, 6, 3)


def task(seeds: tuple[int, ...] = (0, 1), n: int = 24) -> Task:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(len(seeds), n, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (len(seeds), n), generator=generator)
    others = {"other": torch.randn(len(seeds), 10, 4, generator=generator, dtype=torch.float64)}

    def measure(outputs, seed):
        losses = cross_entropy(outputs["train"], y[seed])
        return {"loss": losses.mean(1), "size": outputs["other"].pow(2).mean((1, 2))}

    return Task(seeds=seeds, x=x, y=y, others=others, measure=measure, classes=3)


def test_gradients_by_hand():
    flat = drawn(SIZES, [3, 4], torch.float64)
    stack, x = Stack(SIZES, flat), torch.randn(2, 9, 4, dtype=torch.float64)
    y, seen = torch.randint(3, (2, 9)), stack.forward(x)
    parts = stack.gradient(seen, cross_entropy_gradient(seen[-1], y))
    into = torch.cat([part.flatten(1) for part in parts], 1)
    assert torch.equal(stack.flat, flat)
    for run in range(2):
        model = stack.network(run)
        loss = functional.cross_entropy(model(x[run]), y[run])
        loss.backward()
        expected = torch.cat([p.grad.mT.flatten() if p.ndim == 2 else p.grad for p in model.parameters()])
        assert torch.allclose(into[run], expected)
        assert torch.allclose(cross_entropy(seen[-1], y)[run].mean(), loss.detach())


def test_weights_are_drawn_as_torch_draws_them():
    flat = drawn((400, 300), range(3), torch.float64)
    assert flat.abs().max() <= 0.05
    assert flat.std().item() == pytest.approx(0.05 / 3**0.5, rel=0.01)
    assert torch.equal(drawn((400, 300), [2], torch.float64)[0], flat[2])


@pytest.mark.parametrize("keep_initial", [True, False])
def test_a_stack_is_a_plain_loop_of_linearized_models(keep_initial: bool):
    """Seeds, α and rates together, with momentum and runs that end early, against one loop each."""
    given = task()
    runs = [Run(0, 1, 0.1), Run(1, 1, 0.1), Run(0, 50, 0.1), Run(1, 0.5, 0.03)]
    how = Together(
        hidden=(7, 6), momentum=0.9, batch=5, keep_initial=keep_initial, dtype=torch.float64, growth=1.3, probe=8
    )
    ends = {runs[0]: 9}  # one leaves the stack while others go on
    found = how.run(given, runs, 4, lambda run, log: log["step"][-1] >= ends.get(run, 99), Silent())
    assert [one.run for one in found] == runs
    for one in found:
        run, place, last = one.run, given.seeds.index(one.run.seed), int(one.log["step"][-1])
        model = copy.deepcopy(one.start)
        net = lw.linearized(model, run.alpha, keep_initial)
        opt = lw.regimes.rescaled(torch.optim.SGD(net.parameters(), lr=run.lr, momentum=0.9), run.alpha)
        generator, x, y, order = stream(run.seed, "order"), given.x[place], given.y[place], torch.empty(0)
        for step in range(last):
            if step % 4 == 0:  # 24 examples, of which 20 are seen in an epoch
                order = torch.randperm(24, generator=generator)
            chosen = order[step % 4 * 5 :][:5]
            opt.zero_grad()
            functional.cross_entropy(net(x[chosen]), y[chosen]).backward()
            opt.step()
        for ours, theirs in zip(one.model.parameters(), model.parameters(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)
        with torch.no_grad():
            assert one.log["loss"][-1] == pytest.approx(functional.cross_entropy(net(x), y).item())
            assert one.log["size"][-1] == pytest.approx(net(given.others["other"][place]).pow(2).mean().item())
        assert one.log["signs"][-1] == pytest.approx(lw.regimes.sign_similarity(one.model, x[:8], one.start))
        assert torch.equal(one.probe, x[:8])
    assert found[0].log["step"][-1] < found[1].log["step"][-1] == 16


def test_seeds_do_not_depend_on_each_other():
    given = task((0, 1))
    how = Together(hidden=(7,), momentum=0.9, batch=6, keep_initial=True, dtype=torch.float64, growth=1.5, probe=4)
    both = how.run(given, [Run(0, 1, 0.1), Run(1, 1, 0.1)], 3, lambda *_: False, Silent())
    alone = how.run(given, [Run(1, 1, 0.1)], 3, lambda *_: False, Silent())
    assert both[1].log["loss"] == pytest.approx(alone[0].log["loss"])
    assert both[0].log["loss"][0] != both[1].log["loss"][0]


def test_one_after_the_other_logs_the_same(monkeypatch: pytest.MonkeyPatch):
    """The path of photographs, with a network of the stack in place of a residual one."""
    given, runs = task(), [Run(0, 1, 0.1), Run(1, 20, 0.1)]
    shared = {"momentum": 0.9, "batch": 5, "keep_initial": True, "probe": 8, "growth": 1.3}
    stacked = Together(hidden=(7, 6), dtype=torch.float64, **shared).run(given, runs, 3, lambda *_: False, Silent())
    start = {0: stacked[0].start, 1: stacked[1].start}
    monkeypatch.setattr(Alone, "model", lambda self, seed, classes: copy.deepcopy(start[seed]))
    alone = Alone(network="resnet18", width=4, **shared).run(given, runs, 3, lambda *_: False, Silent())
    for a, b in zip(stacked, alone, strict=True):
        assert a.log.keys() == b.log.keys()
        for name, column in a.log.items():
            assert column == pytest.approx(b.log[name], rel=1e-6), name


def test_a_residual_network_on_small_photographs():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(1, 12, 3, 32, 32, generator=generator), torch.randint(2, (1, 12), generator=generator)
    given = Task(
        seeds=(3,),
        x=x,
        y=y,
        measure=lambda outputs, seed: {"loss": cross_entropy(outputs["train"], y[seed]).mean(1)},
        classes=2,
    )
    how = Regimes(network="resnet18", width=2, batch=4, epochs=2, growth=3, probe=4)
    (one,) = how.run(given, [Run(3, 10, 0.01)])
    assert one.model.head.out_features == 2
    assert one.log["loss"][-1] != one.log["loss"][0]
    found = linearity(one)
    assert set(found) == {"signs", "kernel", "representation"}
    assert all(0.9 < value <= 1 for value in found.values())


def test_yin_yang_is_a_plain_loop():
    """Steps to the thresholds, test losses there and signs, against one loop for each α."""
    config = YinYangRuns(points=20, hidden=(8, 8), thresholds=(0.67, 0.64), alphas=(1, 10), side=6, steps=3000, lr=0.5)
    found = config.compared([5, 6])
    alone = config.compared([6])
    assert found[1].steps == alone[0].steps
    x, y = yin_yang(20, 5)
    grid = yin_yang_grid(6)
    losses = {}
    for alpha in config.alphas:
        model = Stack((2, 8, 8, 1), drawn((2, 8, 8, 1), [5])).network(0)
        start = copy.deepcopy(model)
        net = lw.linearized(model, alpha, keep_initial=False)
        opt = lw.regimes.rescaled(torch.optim.SGD(net.parameters(), lr=0.5), alpha)
        steps, losses[alpha] = [], []
        for step in range(config.steps):
            loss = functional.softplus(-y.float() * net(x.float()).squeeze(1)).mean()
            if loss <= config.thresholds[len(steps)]:
                steps.append(step)
                with torch.no_grad():
                    losses[alpha].append(functional.softplus(-grid.y.float() * net(grid.x.float()).squeeze(1)))
                if len(steps) == 2:
                    break
            opt.zero_grad()
            loss.backward()
            opt.step()
        assert found[0].steps[alpha] == pytest.approx(steps, abs=1)
        assert found[0].signs[alpha] == pytest.approx(lw.regimes.sign_similarity(model, x.float(), start), abs=0.01)
    for k in range(2):
        assert torch.allclose(found[0].difference[k].float(), losses[1][k] - losses[10][k], atol=2e-3)


def test_regions_and_rings():
    masks = regions(40, "diagonal")
    assert masks["easy"].double().mean() == pytest.approx(0.5)
    assert masks["disc"].double().mean() == pytest.approx(2 * torch.pi * 0.09 / 4, rel=0.05)
    middles, means = rings(masks["disc"].double(), 40, "diagonal")
    clear = [(middle, mean) for middle, mean in zip(middles, means, strict=True) if abs(middle - 0.3) > 0.02]
    assert all(mean == (1 if middle < 0.3 else 0) for middle, mean in clear if middle > 0.05)


def test_a_run_that_does_not_come_to_a_threshold():
    config = YinYangRuns(points=20, hidden=(8,), thresholds=(0.68, 0.01), side=4, steps=60)
    (found,) = config.compared([1])
    assert len(found.steps[1]) <= 1
    assert len(found.difference) <= 1


def test_metrics_at_thresholds():
    log = {"loss": [2.0, 1.0, 0.5], "x": [0.0, 1.0, 2.0]}
    found = reached(log, "loss", [1.5, 0.75, 0.1], ["x"])["x"]
    assert found[:2] == pytest.approx([0.5, 1.5])
    assert found[2] != found[2]
    assert falling(2.0, 0.5, 3) == pytest.approx([2.0, 1.0, 0.5])


# --- data ----------------------------------------------------------------------------------------------------


def test_noisy_digits():
    pytest.importorskip("sklearn")
    split = examples.Split("digits", 4, 200)
    made = examples.noisy([split], 0.15)
    wrong = made.y[0] != split.y
    assert int(wrong.sum()) == 30
    outputs = {
        "train": functional.one_hot(made.y, 10) * 50.0,
        "test": functional.one_hot(split.held_y, 10)[None] * 50.0,
    }
    outputs["train"][0, wrong] = functional.one_hot(split.y[wrong], 10) * 50.0
    found = made.measure(outputs, torch.tensor([0]))
    assert found["clean"].item() == pytest.approx(0, abs=1e-6)
    assert found["noisy"].item() == pytest.approx(50)
    assert found["test"].item() == pytest.approx(0, abs=1e-6)  # test labels are right
    assert found["accuracy"].item() == 1


def test_deciles_of_digits():
    pytest.importorskip("sklearn")
    split = examples.Split("digits", 4, 100)
    scores = torch.linspace(0, 1, 100)
    made = examples.by_cscore([split], [scores], 10)
    logits = torch.zeros(1, 100, 10)
    logits[0, :10] = -20.0 * functional.one_hot(split.y[:10], 10)
    found = made.measure({"train": logits}, torch.tensor([0]))
    assert found["spread"].item() == pytest.approx(20 + torch.log(torch.tensor(9 / 10)).item(), abs=1e-3)
    assert found["part 9"].item() == pytest.approx(torch.log(torch.tensor(10.0)).item())


def test_spurious_digits():
    pytest.importorskip("sklearn")
    split = examples.Split("digits", 4, 1000)
    made = examples.spurious([split], 0.9, 2, 0.5)
    assert made.x.shape == (1, 1000, 66)
    agree = (made.x[0, :, 64] > 0).long() == made.y[0]
    assert int(agree.sum()) == 900
    outputs = {name: x[..., 64:].flip(2) * torch.tensor([-1.0, 1.0]) for name, x in made.others.items()}  # the rule
    found = made.measure({**outputs, "train": torch.zeros(1, 1000, 2)}, torch.tensor([0]))
    assert found["with"].item() == 1
    assert found["without"].item() == 0
    assert found["balanced"].item() == 0.5


def test_bad_settings():
    pytest.importorskip("sklearn")
    with pytest.raises(NameLookupError, match="digits"):
        examples.Split("letters", 0, 10)
    with pytest.raises(InputError, match="Leave some"):
        examples.Split("digits", 0, 1797)
    with pytest.raises(NameLookupError, match="resnet18"):
        Regimes(network="resnet19")
    with pytest.raises(InputError, match="falling"):
        YinYangRuns(thresholds=(0.3, 0.5))
    with pytest.raises(InputError, match="part of them"):
        Together(hidden=(4,), momentum=0.9, batch=100, keep_initial=True, probe=4).run(
            task(), [Run(0, 1, 0.1)], 1, lambda *_: False, Silent()
        )


def photographs(folder: Path, names: list[str]) -> None:
    Image = pytest.importorskip("PIL.Image")
    for k, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (10, 12), (20 * k % 256, 10, 200)).save(folder / name)


def test_waterbirds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LAYERWISE_DATA", str(tmp_path))
    with pytest.raises(MissingDataError, match=r"waterbirds/metadata\.csv"):
        attributes.entries("waterbirds")
    rows = [(k, f"bird/{k}.jpg", k % 2, k // 2 % 2, (0, 2)[k // 8]) for k in range(16)]
    photographs(tmp_path / "waterbirds", [name for _, name, *_ in rows])
    lines = ["img_id,img_filename,y,place,split", *(",".join(map(str, row)) for row in rows)]
    (tmp_path / "waterbirds" / "metadata.csv").write_text("\n".join(lines))
    made = attributes.spurious_photographs("waterbirds", 0, 8, 6, "cpu")
    assert made.x.shape == (1, 8, 3, 6, 6)
    assert made.y[0].tolist() == [0, 1] * 4
    assert {name: x.shape[1] for name, x in made.others.items()} == {"with": 4, "without": 4}
    right = {name: torch.eye(2)[torch.tensor([0, 0, 1, 1])][None] for name in made.others}  # cells in order
    found = made.measure({"train": torch.zeros(1, 8, 2), **right}, torch.tensor([0]))
    assert found["balanced"].item() == 1
    (tmp_path / "waterbirds" / "metadata.csv").write_text("file\n1.jpg")
    with pytest.raises(FileFormatError, match="img_filename"):
        attributes.entries("waterbirds")


def test_celeba(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LAYERWISE_DATA", str(tmp_path))
    folder = tmp_path / "celeba"
    with pytest.raises(MissingDataError, match=r"list_attr_celeba\.txt.*img_align_celeba"):
        attributes.entries("celeba")
    photographs(folder / "img_align_celeba", ["1.jpg", "2.jpg"])
    (folder / "list_attr_celeba.txt").write_text("2\nBlond_Hair Male\n1.jpg 1 -1\n2.jpg -1 1\n")
    (folder / "list_eval_partition.txt").write_text("1.jpg 0\n2.jpg 2\n")
    woman, man = attributes.entries("celeba")
    assert (woman.label, woman.attribute, woman.split) == (1, 1, "train")
    assert (man.label, man.attribute, man.split) == (0, 0, "test")
    with pytest.raises(NameLookupError, match="celeba"):
        attributes.entries("faces")


def test_published_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    numpy = pytest.importorskip("numpy")
    monkeypatch.setenv("LAYERWISE_DATA", str(tmp_path))
    labels = torch.tensor([1, 0, 2])
    with pytest.raises(MissingDataError, match="cscores"):
        examples.published_scores(labels)
    (tmp_path / "cifar10").mkdir()
    numpy.savez(tmp_path / examples.PUBLISHED, scores=numpy.array([0.1, 0.2, 0.3]), labels=numpy.array([1, 0, 2]))
    assert examples.published_scores(labels).tolist() == pytest.approx([0.1, 0.2, 0.3])
    with pytest.raises(FileFormatError, match="order"):
        examples.published_scores(labels.flip(0))


def test_missing_photographs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LAYERWISE_DATA", str(tmp_path))
    examples.photographs.cache_clear()
    with pytest.raises(MissingDataError, match=r"LAYERWISE_DATA with cifar10/train-\S+parquet"):
        examples.check_images("cifar10", 40_000)


def test_scores_of_photographs(monkeypatch: pytest.MonkeyPatch):
    """Estimated on held-out and training images together, and given for the held-out ones."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(40) % 10
    x = torch.rand(40, 3, 32, 32, generator=generator)
    monkeypatch.setattr(examples, "photographs", lambda limit=None: examples.data.Images(x, y))
    monkeypatch.setattr(examples, "_convolutions", lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)))
    real = examples.estimate_cscores
    monkeypatch.setattr(examples, "estimate_cscores", lambda *a, **k: real(*a, **{**k, "steps": 2}))
    split = examples.Split("cifar10", 0, 30)
    scores = examples.cscores(split, 12, 0.3)
    assert scores.shape == (10,)
    made = examples.by_cscore([split], [scores], 5)
    found = made.measure({"train": torch.zeros(1, 30, 10), "held": torch.zeros(1, 10, 10)}, torch.tensor([0]))
    assert found["spread"].item() == pytest.approx(0, abs=1e-6)


def test_two_thresholds_in_one_step_while_another_run_ends():
    runs = YinYangRuns(points=20, thresholds=(0.69, 0.6895), steps=200, side=4, lr=1.0)
    assert len(runs.compared(range(20))) == 20
