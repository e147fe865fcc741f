"""pac-bayes: the smoke preset, claims that can fail, and the printed table."""

import dataclasses

import pytest
import torch
from experiment_records import smoke

from error_sentences import WORDED
from layerwise.bounds.pac_bayes.result import PacBayes
from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.experiments.records import comparable
from layerwise.experiments.runner import run
from layerwise.experiments.wu2024 import pac_bayes
from layerwise.foundations.errors import FileFormatError, LayerwiseError
from layerwise.studies.hessian_structure import pac_bayes as study
from layerwise.studies.hessian_structure import printed_bounds

pytest.importorskip("sklearn")
EXPERIMENT = pac_bayes.EXPERIMENT


def test_smoke_is_as_expected():
    config = EXPERIMENT.preset("smoke")
    for claim in EXPERIMENT.claims(config):
        verdict = judge(claim, smoke("pac-bayes"))
        assert verdict.as_expected, (claim.name, verdict.detail)
    (row,) = [r for r in smoke("pac-bayes") if r["cell"] == "digits-30/0.1"]
    assert {"ekfac/bound", "iter/kl", "base/j", "base/kl/0", "test_error"} <= set(row["values"])
    assert row["series"]["epoch"][-1] == config.epochs
    assert row["values"]["ekfac/kl"] < row["values"]["iter/kl"]  # variances from curvature begin near the prior
    for figure in EXPERIMENT.figures(config, smoke("pac-bayes")):
        assert all(len(curve.x) == len(curve.y) for panel in figure.panels for curve in panel.curves)


def invented(config, changes):
    """A row for each cell, in which every method has the bound .3, and some have others."""
    values = {f"{v}/{name}": x for v in config.variants for name, x in (("bound", 0.3), ("j", 1.0), ("test", 0.1))}
    values |= changes
    cells = [cell.key for cell in EXPERIMENT.cells_of(config) if cell.key != "table"]
    return [
        {"cell": cell, "seed": seed, "values": values | {"test_error": 0.1 + seed}, "series": {}}
        for cell in cells
        for seed in (0, 1, 2)
    ]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("appr-base", {"appr/bound": 0.2}, {"appr/bound": 0.29}),
        ("iter-appr", {"iter/bound": 0.31}, {"iter/bound": 0.33}),
        ("iter-d", {"iter-d/bound": 0.31}, {"iter-d/bound": 0.27}),
        ("ekfac-iter", {"ekfac/bound": 0.25}, {"ekfac/bound": 0.3}),
        ("ekfac-curvature", {"ekfac/bound": 0.29}, {"ekfac/bound": 0.32}),
        ("variances", {"iter-curvature/bound": 0.27}, {"iter-curvature/bound": 0.3}),
        ("variances-base", {"base-curvature/bound": 0.2}, {"base-curvature/bound": 0.29}),
        ("basis", {"iter-curvature/bound": 0.2}, {"iter-curvature/bound": 0.29}),
        ("holds", {}, {"iter/test": 0.31}),
        ("grid", {}, {"appr/j": 0.0}),
    ],
)
def test_claims_can_fail(name, good, bad):
    config = EXPERIMENT.preset("laptop")
    (claim,) = [c for c in EXPERIMENT.claims(config) if c.name == f"digits-30/0.1/{name}"]
    assert judge(claim, invented(config, good)).status == HELD
    assert judge(claim, invented(config, bad)).status == NOT_HELD


def test_the_larger_cap_is_compared_seed_by_seed():
    config = EXPERIMENT.preset("laptop")
    (claim,) = [c for c in EXPERIMENT.claims(config) if c.name == "digits-30/cap/iter"]
    rows = invented(config, {})
    assert claim.quantity(rows) == {0: 1.0, 1: 1.0, 2: 1.0}
    rows[-1]["values"]["iter/bound"] = 0.6
    assert claim.quantity(rows)[2] == 2.0


def test_the_paper_preset_compares_with_the_table():
    config = dataclasses.replace(EXPERIMENT.preset("paper"), device="cpu")
    names = {claim.name for claim in EXPERIMENT.claims(config)}
    assert {f"{n}/0.1/{v}/printed" for n in printed_bounds.NETWORKS for v in ("base", "appr", "iter")} <= names
    schedule = config.schedule()
    assert [round(schedule.options("iter", 0.1, 0).rate(e), 9) for e in (0, 399, 400, 1999)] == [1e-3, 1e-3, 1e-4, 1e-7]
    slow = schedule.options("iter-d", 0.1, 0)
    assert slow.due(10, 0)
    assert not slow.due(450, 400)
    assert slow.due(500, 400)


def test_a_seed_has_its_own_data_and_weights():
    a, b = (study.trained(dataclasses.replace(study.NETWORKS["digits-30"], epochs=1), seed) for seed in (0, 1))
    assert not torch.equal(a.x, b.x)
    assert a.x.shape == (1500, 64)
    assert set(a.y.tolist()) == {0, 1}
    assert not torch.equal(a.init[0].weight, b.init[0].weight)
    assert not torch.equal(a.init[0].weight, a.model[0].weight)


class Inner:
    """Progress within a cell, stopped after so many epochs."""

    def __init__(self, after: int | None = None) -> None:
        self.after, self.epochs = after, []

    def track(self, items, description, total):
        for number, item in enumerate(items):
            if number == self.after:
                raise KeyboardInterrupt
            self.epochs.append(item)
            yield item


class Outer:
    """Progress of the whole run."""

    def __init__(self, inner: Inner) -> None:
        self.inner = inner

    def track(self, items, description, total):
        yield from items


@pytest.fixture
def went(tmp_path, monkeypatch):
    """Runs two seeds with five epochs, and counts the epochs and the networks that were trained before."""
    config = dataclasses.replace(
        EXPERIMENT.preset("smoke"), seeds=2, training=1, epochs=5, interval=2, batch=750, draws=8
    )
    trainings = []

    def counted(model, *args, train=study._train):
        trainings.append(model)
        train(model, *args)

    monkeypatch.setattr(study, "_train", counted)

    def went(out, after=None):
        trainings.clear()
        inner = Inner(after)
        outcome = run(EXPERIMENT, config, preset="smoke", out=tmp_path / out, progress=Outer(inner))
        return outcome, inner.epochs, len(trainings)

    return went


def by_key(outcome):
    return {(r["cell"], r["seed"]): comparable(r) for r in outcome.recorded.records}


@pytest.mark.parametrize("after", [1, 3])
def test_a_cell_that_was_stopped_goes_on(tmp_path, went, after):
    """With the first bases, or with later ones: of pixels that are always zero any vectors are eigenvectors."""
    whole, epochs, trained = went("whole")
    assert (epochs, trained) == ([0, 1, 2, 3, 4], 2)
    first, epochs, trained = went("stopped", after)
    assert (first.interrupted, first.missing, epochs, trained) == (True, 2, list(range(after)), 2)
    (folder,) = (tmp_path / "stopped").glob("*/*.unfinished")
    again, epochs, trained = went("stopped")
    assert (again.interrupted, again.missing, epochs, trained) == (False, 0, list(range(after, 5)), 0)
    assert by_key(again) == by_key(whole)
    assert not folder.exists()


def test_a_cell_that_was_stopped_at_its_last_seed_goes_on(monkeypatch, went):
    """No seed is recorded without the others, with which it is kept."""

    def stopped(result, data, draws, seed, error_on=PacBayes.error_on):
        if seed == 1:
            raise KeyboardInterrupt
        return error_on(result, data, draws, seed)

    with monkeypatch.context() as patch:
        patch.setattr(PacBayes, "error_on", stopped)
        first, epochs, _ = went("stopped")
    assert (first.interrupted, first.missing, len(epochs)) == (True, 2, 5)
    again, epochs, trained = went("stopped")
    assert (again.missing, epochs, trained) == (0, [], 0)
    assert by_key(again) == by_key(went("whole")[0])


def test_a_trained_network_is_kept(tmp_path):
    what, path = dataclasses.replace(study.NETWORKS["digits-30"], epochs=1), tmp_path / "0.trained"
    first, again, alone = study.trained(what, 0, keep=path), study.trained(what, 0, keep=path), study.trained(what, 0)
    for a, b, c in zip(*(net.model.parameters() for net in (first, again, alone)), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    for other, seed in ((dataclasses.replace(what, epochs=2), 0), (what, 1)):
        with pytest.raises(FileFormatError, match="another model"):
            study.trained(other, seed, keep=path)


def test_unknown_names_are_refused():
    config = EXPERIMENT.preset("smoke")
    for change in ({"networks": ("T-6",)}, {"variants": ("itre",)}, {"variants": ("iter", "iter")}):
        with pytest.raises(LayerwiseError, match=WORDED):
            EXPERIMENT.refuse_bad(dataclasses.replace(config, **change))
