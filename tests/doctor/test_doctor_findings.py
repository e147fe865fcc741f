"""Findings: what is said of planted faults, in which order; and the model that is left as it was."""

import dataclasses
import importlib.util
import math
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from layerwise.doctor.examination import doctor as examine
from layerwise.doctor.findings import Finding, ordered
from layerwise.doctor.rules import KINDS, UNBOUNDED
from layerwise.doctor.rules.data import output_scale
from layerwise.foundations.errors import InputError

ROOT = Path(__file__).parents[2]
SHORT = (
    "healthy-mlp",
    "one-huge-feature",
    "one-class-in-nine-of-ten",
    "dead-relus",
    "saturated-sigmoids",
    "overflow",
    "frozen-layer",
    "sgd-too-fast",
)
"""Patients of the zoo that take a second or less."""


assert lw.doctor is examine  # a function, although a package has its name


def load_zoo():
    """`benchmarks/doctor` under its own name, and nothing else of `benchmarks`."""
    folder = ROOT / "benchmarks" / "doctor"
    places = [str(folder)]
    spec = importlib.util.spec_from_file_location("doctor", folder / "__init__.py", submodule_search_locations=places)
    module = importlib.util.module_from_spec(spec)
    sys.modules["doctor"] = module
    spec.loader.exec_module(module)
    return importlib.import_module("doctor.zoo")


zoo = load_zoo()
PATIENTS = {one.name: one for one in zoo.ZOO}


def examined(name: str, seed: int, **options) -> tuple:
    case = zoo.made(PATIENTS[name], seed)
    options = {"members": (), "seconds": 600, "optimizer": case.optimizer} | options
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return PATIENTS[name], lw.doctor(case.model, case.data, case.likelihood, **options)


# --- the zoo ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHORT)
def test_planted_fault_comes_first(name: str):
    patient, report = examined(name, seed=20)
    if patient.fault is None:
        assert not report.severe(), report.findings
    else:
        assert report.findings[0].kind == patient.fault, report.findings
        assert report.findings[0].severity == "severe"
        gains = [one.gain for one in report.findings if one.kind not in UNBOUNDED]
        assert all(0 <= gain <= report.measured.loss for gain in gains), "no gain is more than the loss"


@pytest.mark.slow
def test_the_zoo():
    """At least 20 faults and 5 healthy networks: nine faults of ten come first, no healthy network has a severe one."""
    assert sum(one.fault is not None for one in zoo.ZOO) >= 20
    assert sum(one.fault is None for one in zoo.ZOO) >= 5
    wrong, alarms = [], []
    for name in PATIENTS:
        patient, report = examined(name, seed=21, members=("SGD", "Adam", "KFAC"))
        first = report.findings[0].kind if report.findings else "nothing"
        if patient.fault is None and report.severe():
            alarms.append((name, first))
        elif patient.fault is not None and first != patient.fault:
            wrong.append((name, patient.fault, first))
    assert len(wrong) <= 0.1 * sum(one.fault is not None for one in zoo.ZOO), wrong
    assert not alarms


def test_every_fault_of_the_zoo_is_a_kind_that_is_documented():
    assert {one.fault for one in zoo.ZOO if one.fault} <= set(KINDS)
    guide = (ROOT / "docs" / "guides" / "doctor.md").read_text(encoding="utf-8")
    assert all(f"`{kind}`" in guide for kind in KINDS)


# --- order --------------------------------------------------------------------------------------------------------


def finding(kind: str, severity: str, gain: float, *follows_from: str) -> Finding:
    return Finding(kind, severity, gain, "It is so.", "Because.", "Do this.", (), follows_from)


def test_findings_are_in_order_of_severity_and_gain():
    found = [
        finding("a", "note", 9.0),
        finding("b", "severe", 1.0),
        finding("c", "severe", 2.0),
        finding("d", "moderate", 5.0),
    ]
    assert [one.kind for one in ordered(found)] == ["c", "b", "d", "a"]


def test_what_follows_from_another_finding_is_a_note_after_it():
    found = [finding("symptom", "severe", 100.0, "cause", "other"), finding("cause", "severe", 1.0)]
    assert [(one.kind, one.severity) for one in ordered(found)] == [("cause", "severe"), ("symptom", "note")]
    assert ordered(found[:1])[0].severity == "severe"


def test_findings_are_frozen():
    with pytest.raises(AttributeError):
        finding("a", "note", 0.0).gain = 1.0


# --- the model ----------------------------------------------------------------------------------------------------


def test_model_optimizer_and_random_state_are_left_as_they_were():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3)
    )
    model[0].requires_grad_(False)
    model[3].eval()
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    x = torch.randn(64, 1, 6, 6)
    data = x, x.mean((2, 3)).squeeze(1).mul(6).long().clamp(0, 2)
    nn.functional.cross_entropy(model(data[0]), data[1]).backward()
    opt.step()

    def state() -> list:
        tensors = [*model.state_dict().values(), *(t for s in opt.state.values() for t in s.values())]
        flags = [p.requires_grad for p in model.parameters()] + [module.training for module in model.modules()]
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        hooks = [len(module._forward_hooks) for module in model.modules()]
        return [[t.clone() for t in tensors], grads, flags, hooks, torch.get_rng_state()]

    before = state()
    report = lw.doctor(model, data, optimizer=opt, members=("SGD", "KFAC"))
    after = state()
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))
    assert before[2:4] == after[2:4]
    assert torch.equal(before[4], after[4])
    assert report.measured.frozen == ("0.weight", "0.bias")
    assert "batch norm" in " ".join(report.measured.notes)
    assert report.findings[0].kind == "frozen"


def test_the_same_seed_gives_the_same_report():
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3), torch.randn(200, 5)
    first, second = (lw.doctor(model, (x, x[:, :3].argmax(1)), members=()).measured for _ in range(2))
    assert first.layers == second.layers
    assert first.targets == second.targets


@pytest.mark.parametrize("kind", ["list", "generator", "loader", "mapping"])
def test_data_may_be_streamed(kind: str):
    torch.manual_seed(0)
    x = torch.randn(200, 5)
    y = x[:, :2].argmax(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    pairs = [(x[k : k + 50], y[k : k + 50]) for k in range(0, 200, 50)]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=50)
    data = {
        "list": pairs,
        "generator": (pair for pair in pairs),
        "loader": loader,
        "mapping": {"input": x, "labels": y},
    }
    report = lw.doctor(model, data[kind], members=("SGD",))
    assert report.measured.examples == 200
    assert report.measured.batches == {"mapping": 2}.get(kind, 4)


def test_recurrent_models_fall_back():
    case = zoo.made(PATIENTS["healthy-gru"], 0)
    report = lw.doctor(case.model, tuple(t[:48] for t in case.data), members=())
    names = [layer.name for layer in report.measured.layers]
    assert "rnn.weight_hh_l0" in names
    assert all(layer.reach >= 0 for layer in report.measured.layers)


def test_time_is_kept_and_what_is_left_out_is_said():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
    x = torch.randn(20_000, 64)
    report = lw.doctor(model, (x, x[:, :4].argmax(1)), seconds=1.5)
    assert report.took < 8
    assert report.measured.examples < 20_000
    assert any("No time" in note or "Time allowed" in note for note in report.measured.notes)


def test_spectra_that_are_too_large_are_of_some_features(monkeypatch):
    monkeypatch.setattr(sys.modules["layerwise.doctor.examination"], "affordable_spectrum", lambda *_: 16)
    torch.manual_seed(0)
    x = torch.randn(256, 40)
    report = lw.doctor(nn.Linear(40, 3), (x, x[:, :3].argmax(1)), members=())
    side = report.measured.layers[0].inputs
    assert (side.size, side.of) == (41, 16)
    assert any("16 of them" in note for note in report.measured.notes)


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seconds": -1.0}, "seconds=-1.0"),
        ({"seconds": float("inf")}, "seconds=inf"),
        ({"memory": 0}, "memory=0"),
        ({"members": ("KFCA",)}, "members="),
        ({"likelihood": "poisson"}, "poisson"),
    ],
)
def test_bad_options(options: dict, said: str):
    with pytest.raises(lw.LayerwiseError) as error:
        lw.doctor(nn.Linear(2, 2), (torch.randn(8, 2), torch.randint(2, (8,))), **options)
    assert said in str(error.value)


def test_data_without_targets():
    with pytest.raises(InputError, match="a target"):
        lw.doctor(nn.Linear(2, 2), torch.randn(8, 2))


def test_a_model_without_parameters():
    with pytest.raises(InputError, match="without parameters"):
        lw.doctor(nn.ReLU(), (torch.randn(8, 2), torch.randint(2, (8,))))


# --- what networks drawn at random have shown ------------------------------------------------------------------------


def test_one_example_that_is_not_finite_is_found_among_many() -> None:
    x, y = torch.randn(900, 6), torch.randint(3, (900,))
    x[777, 2] = torch.nan  # not among the examples that are run first
    report = lw.doctor(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (x, y), members=())
    assert report.findings[0].kind == "not-finite"
    assert report.measured.broken_examples == 1
    assert "1 examples" in report.findings[0].statement


def test_a_last_layer_that_is_too_large_is_no_explosion() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    with torch.no_grad():
        model[-1].weight.mul_(150)
    x = torch.randn(300, 8)
    kinds = [finding.kind for finding in lw.doctor(model, (x, x[:, :4].argmax(1)), members=()).findings]
    assert kinds[0] == "output-scale"
    assert "exploding-activations" not in kinds


def test_features_that_are_copies_of_one_another_are_anisotropic() -> None:
    torch.manual_seed(0)
    z = torch.randn(400, 10)
    x = torch.randn(400, 1) + 0.01 * z
    report = lw.doctor(
        nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4)), (x, z[:, :4].argmax(1)), members=()
    )
    assert report.measured.inputs is not None
    assert report.measured.inputs.common is not None
    assert report.measured.inputs.common > 0.99
    assert report.findings[0].kind == "anisotropic-inputs"


def test_learned_queries_are_no_constant_representation() -> None:
    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.randn(3, 8))
            self.look, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(24, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.look(self.queries.expand(len(x), -1, -1), x, x, need_weights=False)[0].flatten(1))

    torch.manual_seed(0)
    x = torch.randn(128, 9, 8)
    found = lw.doctor(Queries(), (x, x.mean(1)[:, :3].argmax(1)), members=()).findings
    assert "constant-representation" not in [finding.kind for finding in found]


def test_a_step_that_only_fits_noise_still_has_a_rate() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    x, y = torch.randn(64, 6), torch.randint(3, (64,))  # labels are noise: one half's step does not help the other
    for seed in range(4):
        opt = torch.optim.SGD(model.parameters(), lr=1e-8)
        own = lw.doctor(model, (x, y), optimizer=opt, members=(), seed=seed).measured.own_step
        assert own is not None
        assert own.best_multiple > 1e3


@pytest.mark.parametrize(("multiple", "severity"), [(1.4, None), (2.3, "moderate"), (4.5, "severe")])
def test_a_loss_above_chance_is_severe_where_it_takes_long_to_undo(multiple: float, severity: str | None) -> None:
    """Only the loss is set; He's initialisation now and then begins at twice the loss of chance."""
    _, report = examined("healthy-mlp", seed=20)
    assert report.measured.targets is not None
    chance = math.log(report.measured.targets.classes)
    found = list(output_scale(dataclasses.replace(report.measured, loss=multiple * chance)))
    assert [one.severity for one in found] == ([] if severity is None else [severity])
    assert all(one.gain == pytest.approx(multiple * chance - report.measured.targets.constant_loss) for one in found)


def test_a_healthy_network_that_begins_above_chance_has_no_severe_finding() -> None:
    patient, report = examined("fresh-conv1d", seed=21)
    assert patient.fault is None
    assert report.measured.loss > 2 * math.log(3)
    assert [one.severity for one in report.findings if one.kind == "output-scale"] == ["moderate"]
    assert not report.severe()
