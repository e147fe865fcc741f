"""Experiments about layer Hessians: smoke presets hold what they claim, claims can fail, bad settings are refused."""

import dataclasses

import pytest
from experiment_records import smoke

from error_sentences import WORDED
from layerwise.experiments.claims import HELD, NOT_HELD, judge
from layerwise.experiments.wu2024 import (
    batch_norm_breaks_it,
    decoupling,
    eigenvector_correspondence,
    initialisation_theorem,
    input_moments,
    layer_hessian_identity,
    outliers,
    overlap_between_models,
    structure_by_optimizer,
    structure_of_a_transformer,
)
from layerwise.foundations.errors import InputError, LayerwiseError, NameLookupError

pytest.importorskip("sklearn")
EXPERIMENTS = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        layer_hessian_identity,
        input_moments,
        decoupling,
        outliers,
        eigenvector_correspondence,
        batch_norm_breaks_it,
        overlap_between_models,
        initialisation_theorem,
        structure_by_optimizer,
        structure_of_a_transformer,
    )
}
DIGITS = "digits/20-20"


def status(name: str, found: list[dict], preset: str = "laptop") -> dict[str, str]:
    experiment = EXPERIMENTS[name]
    return {claim.name: judge(claim, found).status for claim in experiment.claims(experiment.preset(preset))}


def rows(cell: str, values: dict[str, float], seeds: int = 3) -> list[dict]:
    return [{"cell": cell, "seed": seed, "values": values, "series": {}} for seed in range(seeds)]


def of_layers(values: dict[str, float], layers: tuple[str, ...] = ("fc1", "fc2", "fc3")) -> dict[str, float]:
    return {f"{layer}/{name}": value for layer in layers for name, value in values.items()}


def refuted(name: str, found: list[dict], preset: str = "laptop") -> list[str]:
    return [claim for claim, verdict in status(name, found, preset).items() if verdict == NOT_HELD]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_smoke_is_as_expected(name: str):
    experiment = EXPERIMENTS[name]
    claims = experiment.claims(experiment.preset("smoke"))
    assert claims
    assert [claim.name for claim in claims if judge(claim, smoke(name)).as_expected is not True] == []


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_figures_have_points_and_can_be_made_before_anything_has_run(name: str):
    experiment = EXPERIMENTS[name]
    config = experiment.preset("smoke")
    before, after = experiment.figures(config, []), experiment.figures(config, smoke(name))
    assert len(before) == len(after) >= 1
    curves = [curve for figure in after for panel in figure.panels for curve in panel.curves]
    assert curves
    assert all(len(curve.x) == len(curve.y) > 0 for curve in curves)


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("preset", ["laptop", "paper"])
def test_claims_of_larger_presets_have_names_of_their_own(name: str, preset: str):
    experiment = EXPERIMENTS[name]
    config = experiment.preset(preset)
    names = [claim.name for claim in experiment.claims(config)]
    assert len(names) == len(set(names)) > 0
    assert all(judge(claim, []).status == "not enough runs" for claim in experiment.claims(config))
    assert experiment.cells_of(config)


# --- claims can fail -----------------------------------------------------------------------------------------------


def test_claims_about_inputs_can_fail():
    good = {"alignment": 0.999, "ratio": 6.0, "above_bound": 1.01, "above_printed": 1.2}
    cell = f"{DIGITS}/trained"
    assert refuted("input-moments", rows(cell, of_layers(good))) == []
    for wrong in ({"alignment": 0.98}, {"ratio": 3.0}, {"above_bound": 0.99}, {"above_printed": 0.9}):
        (name,) = wrong
        assert refuted("input-moments", rows(cell, of_layers(good) | of_layers(wrong, ("fc2",)))) == [f"{cell}/{name}"]


def test_printed_ranges_are_those_of_each_network():
    cell = "mnist/600-600/trained"
    for ratio, expected in ((12.0, []), (13.5, [f"{cell}/ratio"]), (11.0, [f"{cell}/ratio"])):
        values = of_layers({"alignment": 0.999, "ratio": ratio, "above_bound": 1.1, "above_printed": 1.1})
        found = status("input-moments", rows(cell, values, 5), "paper")
        assert [name for name, verdict in found.items() if verdict == NOT_HELD] == expected


def test_claims_about_decoupling_can_fail():
    trained, start = f"{DIGITS}/trained", f"{DIGITS}/start"
    good = of_layers({"spectral": 0.2, "overlap@1": 0.9, "overlap@c-1": 0.85})

    def found(**wrong: dict) -> list[str]:
        return refuted("decoupling", rows(trained, good | wrong.get("t", {})) + rows(start, good | wrong.get("s", {})))

    assert found() == []
    assert found(t={"fc3/spectral": 0.41}) == [f"{trained}/spectral"]
    assert found(t={"fc1/overlap@c-1": 0.5}) == [f"{trained}/overlap@c-1"]
    assert found(t={"fc1/overlap@1": 0.5}) == [f"{trained}/overlap@1"]
    assert found(s={"fc2/spectral": 0.3}) == [f"{start}/spectral"]
    assert found(s={"fc2/overlap@c-1": 0.7}) == [f"{start}/overlap@c-1"]


def test_claims_about_outliers_can_fail():
    trained, random = f"{DIGITS}/trained", f"{DIGITS}/random labels"
    good = of_layers({"outputs/fraction": 0.98, "fraction": 0.8}) | {"fc3/outputs/fraction": 1.0}
    less = of_layers({"outputs/fraction": 0.9, "fraction": 0.6})

    def found(wrong: dict, also: dict | None = None) -> list[str]:
        return refuted("outliers", rows(trained, good | wrong) + rows(random, less | (also or {})))

    assert found({}) == []
    assert found({"fc2/outputs/fraction": 0.92}) == [f"{trained}/outputs/fraction"]
    assert found({"fc1/fraction": 0.6}) == [f"{trained}/fraction"]
    assert found({"fc3/outputs/fraction": 0.999}) == [f"{trained}/last-layer"]
    assert found({}, {"fc1/outputs/fraction": 0.98}) == [f"{DIGITS}/labels-make-outliers"]


def test_claims_about_eigenvectors_can_fail():
    cell, good = f"{DIGITS}/trained", of_layers({"rank_one@4": 0.95, "rank_one": 0.9, "along_mean": 0.7})
    assert refuted("eigenvector-correspondence", rows(cell, good)) == []
    for name in ("rank_one@4", "rank_one", "along_mean"):
        found = refuted("eigenvector-correspondence", rows(cell, good | {f"fc2/{name}": 0.55}))
        assert found == [f"{cell}/{name}"]


def test_claims_about_batch_norm_can_fail():
    plain, normed = f"{DIGITS}/trained", f"{DIGITS}/batch norm"
    without, good = of_layers({"spectral": 0.3}), of_layers({"ratio": 1.5, "spectral": 0.5})

    def found(wrong: dict) -> list[str]:
        return refuted("batch-norm-breaks-it", rows(plain, without) + rows(normed, good | wrong))

    assert found({}) == found({"fc1/ratio": 15.0, "fc1/spectral": 0.1}) == []  # the first layer is not behind one
    assert found({"fc2/ratio": 3.1}) == [f"{normed}/ratio"]
    assert found({"fc3/spectral": 0.34}) == [f"{normed}/spectral"]
    assert found({"fc3/spectral": 0.29}) == [f"{DIGITS}/worse", f"{normed}/spectral"]


def test_a_peak_at_the_outputs_would_be_seen():
    good = {"overlap@m": 0.2, "random@m": 0.0156, "overlap@c-1": 0.27, "inputs": 0.35, "peak": 0.28, "peak_at": 7}
    good |= {"from_outputs": -13, "led": 7}
    last, start = good | {"overlap@c-1": 0.3}, good | {"from_outputs": -3, "peak": 0.46, "overlap@c-1": 0.39}
    cells = {"trained/fc1": good, "trained/fc3": last, "start/fc1": start, "start/fc3": start | {"inputs": 0.4}}

    def found(cell: str = "trained/fc1", wrong: dict | None = None) -> set[str]:
        changed = cells | {cell: cells[cell] | (wrong or {})}
        every = [row for name, values in changed.items() for row in rows(f"{DIGITS}/{name}", values)]
        return {name.removeprefix(f"{DIGITS}/") for name in refuted("overlap-between-models", every)}

    headline = "trained/fc1/peak-at-m"
    assert found() == {headline}
    assert found(wrong={"from_outputs": 0}) == set()  # were it as the thesis says, the claim would hold
    assert found(wrong={"overlap@m": 0.05}) == {headline, "trained/fc1/above-chance"}
    assert found(wrong={"overlap@c-1": 0.1}) == {headline, "trained/fc1/overlap@c-1"}
    assert found(wrong={"peak_at": 20}) == {headline, "trained/fc1/as-far-as-led"}
    assert found("trained/fc3", {"inputs": 0.9}) == {headline, "trained/fc3/inputs"}
    assert found("start/fc3", {"inputs": 0.9}) == {headline, "start/fc3/inputs"}
    assert found("start/fc1", {"from_outputs": -9, "peak": 0.3}) == {
        headline,
        "start/fc1/peak-at-m",
        "start/fc1/peak",
    }


def test_the_printed_space_would_be_seen():
    """Were theorem 4.4.1 right as printed, the claim that refutes it would hold, and its limit would not."""
    values = {"decoupled": 0.997, "corrected": 0.999, "printed": 0.999, "rows": 0.999, "gap": 0.05}
    values["gap_of_outputs"] = 0.04
    found = status("initialisation-theorem", rows("n=400", values) + rows("n=100", values))
    assert found["n=400/printed"] == HELD
    assert found["n=400/limit"] == NOT_HELD
    assert found["shrinks/gap"] == found["shrinks/gap_of_outputs"] == NOT_HELD
    low = dict.fromkeys(values, 0.5)
    found = status("initialisation-theorem", rows("n=400", low))
    names = ("decoupled", "corrected", "rows", "gap", "gap_of_outputs")
    assert {found[f"n=400/{name}"] for name in names} == {NOT_HELD}


def test_claims_about_optimizers_can_fail():
    good = of_layers({"rank_one": 0.9, "along_mean": 0.7, "overlap@c-1": 0.7, "spectral": 0.6})
    slow = {f"slow/{name}": value for name, value in of_layers({"overlap@c-1": 0.8, "spectral": 0.4}).items()}

    def found(method: str, wrong: dict) -> list[str]:
        every = []
        for name in structure_by_optimizer.LABELS:
            every += rows(f"{DIGITS}/{name}", good | slow | (wrong if name == method else {}))
        return [name.removeprefix(f"{DIGITS}/") for name in refuted("structure-by-optimizer", every)]

    assert found("none", {}) == []
    assert found("kfac", {"fc2/rank_one": 0.7}) == ["kfac/rank_one"]
    assert found("soap", {"fc2/along_mean": 0.3}) == ["soap/along_mean"]
    assert found("adam", {"fc2/overlap@c-1": 0.3}) == ["adam/overlap@c-1"]
    assert found("muon", of_layers({"overlap@c-1": 0.5})) == ["muon/as-sgd"]
    assert found("kfac", {f"slow/{layer}/overlap@c-1": 0.7 for layer in ("fc1", "fc2", "fc3")}) == [
        "kfac/slower-is-nearer"
    ]
    assert found("sgd", {"slow/fc3/spectral": 0.7}) == ["sgd/slow-error"]


def test_networks_that_did_not_come_to_the_loss_are_left_out():
    config = dataclasses.replace(
        EXPERIMENTS["structure-by-optimizer"].preset("smoke"), methods=("sgd",), slow=(), steps=5
    )
    (row,) = structure_by_optimizer.run(config, structure_by_optimizer.cells(config)[0], [0])
    assert "after 5 steps" in row.values["stopped"]
    assert "fc1/rank_one" not in row.values


# --- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("input-moments", {"settings": ("minst/20-20",)}),
        ("decoupling", {"settings": ("digits/lenet5",)}),
        ("outliers", {"trained_on": 5000}),
        ("eigenvector-correspondence", {"leading": 5}),
        ("overlap-between-models", {"models": 1}),
        ("initialisation-theorem", {"units": (100, 50)}),
        ("initialisation-theorem", {"inputs_of_hessian": 9000}),
        ("layer-hessian-identity", {"examples": 5000}),
        ("structure-by-optimizer", {"methods": ("sgd", "kfca")}),
        ("structure-by-optimizer", {"trials": 1}),
        ("structure-of-a-transformer", {"heads": 3}),
        ("structure-of-a-transformer", {"text": "shakespare"}),
    ],
    ids=str,
)
def test_bad_settings_are_refused_before_anything_runs(name: str, wrong: dict):
    experiment = EXPERIMENTS[name]
    with pytest.raises((InputError, NameLookupError), match=WORDED):
        experiment.refuse_bad(dataclasses.replace(experiment.preset("smoke"), **wrong))


@pytest.mark.parametrize("name", ["input-moments", "structure-of-a-transformer"])
def test_missing_files_are_named(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("LAYERWISE_DATA", str(tmp_path))
    experiment = EXPERIMENTS[name]
    config = dataclasses.replace(experiment.preset("paper"), device="cpu")
    with pytest.raises(LayerwiseError, match=r"train-\*.parquet|tinyshakespeare"):
        experiment.refuse_bad(config)
