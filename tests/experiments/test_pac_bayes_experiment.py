"""pac-bayes: the smoke preset, claims that can fail, and the printed table."""

import dataclasses

import pytest
import torch
from experiment_records import smoke

from error_sentences import WORDED
from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.experiments.wu2024 import pac_bayes
from layerwise.foundations.errors import LayerwiseError
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


def test_unknown_names_are_refused():
    config = EXPERIMENT.preset("smoke")
    for change in ({"networks": ("T-6",)}, {"variants": ("itre",)}, {"variants": ("iter", "iter")}):
        with pytest.raises(LayerwiseError, match=WORDED):
            EXPERIMENT.refuse_bad(dataclasses.replace(config, **change))
