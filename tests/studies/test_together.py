"""Seeds that run together: what a GPU records and replays, with a tape of torch's calls in place of a CUDA graph."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from layerwise import feature_learning as fl
from layerwise.studies.feature_learning import runs
from layerwise.studies.feature_learning.feed import Feed
from layerwise.studies.feature_learning.runs import Group, drawers
from layerwise.studies.feature_learning.together import Iterations, recordable

SMALL = fl.Setting(dx=12, dy=5, k=3, batch=60, scale="trace")
RECORDED = {name: dataclasses.replace(a, lr=[1e-3, 5e-3]) for name, a in fl.ALGORITHMS.items() if recordable(a)}
FIELDS = ("loss", "population_loss", "dist", "transfer", "F", "G")


class Tape(TorchDispatchMode):
    """Calls with the very tensors they were made with: made again, they read and write where they did."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        for func, args, kwargs, out in self.calls:
            new = func(*args, **kwargs)
            if not func._schema.is_mutable:
                for old, value in zip(*map(tree_leaves, (out, new)), strict=True):
                    old.copy_(value)


@pytest.fixture
def taped(monkeypatch):
    """How often each part of an iteration was made rather than replayed."""
    tapes, made = {}, {}

    def run(self, graphs, call, record=True):
        if graphs in tapes:
            tapes[graphs].replay()
            return True
        made[call.__name__] = made.get(call.__name__, 0) + 1
        if made[call.__name__] == 1 or not record:
            call()
            return False
        with Tape() as tapes[graphs]:
            call()
        return True

    monkeypatch.setattr(Iterations, "_made", run)
    monkeypatch.setattr(runs, "together_on", lambda device, seeds: seeds > 1)
    return made


def compare(algorithms, setting=SMALL, **options):
    return fl.compare(algorithms, setting=setting, steps=7, every=3, seeds=2, **options)


class Heir(fl.DFW):
    """May do anything, so that it is not recorded; reads what is derived from a batch."""


OTHERS = {
    "adam": RECORDED["adam"],
    "batch norm": fl.AMGD(lr=[1e-3], norm="coord_batch"),
    "sampled": fl.NGD(fisher="mc", solver="damped"),
    "heir": Heir(lr=1e-2),
}
SOME = {name: RECORDED[name] for name in ("adam", "kfac")}


@pytest.mark.parametrize(
    ("algorithms", "options"),
    [
        (RECORDED, {}),
        ({"adam": RECORDED["adam"]} | OTHERS, {}),
        (SOME, {"same_batch": True}),
        (SOME, {"dtype": torch.float32}),
    ],
    ids=["all", "others", "one batch", "single"],
)
def test_replayed_iterations_are_those_that_are_made(taped, monkeypatch, untyped, algorithms, options):
    found = compare(algorithms, together=2, **options)
    assert taped == {"_draw": 2, "_move": 2}
    monkeypatch.undo()
    digits = 2e-3 if "dtype" in options else 1e-9
    for name, expected in compare(algorithms, **options).items():
        assert torch.equal(found[name].diverged_at, expected.diverged_at)
        for field in FIELDS:
            torch.testing.assert_close(getattr(found[name], field), getattr(expected, field), rtol=digits, atol=digits)


def test_gaussian_inputs_are_replayed_too(taped, monkeypatch, untyped):
    setting = dataclasses.replace(SMALL, data="gaussian")
    found = compare({"kfac": fl.KFAC(lr=[1e-2])}, setting, together=2)["kfac"]
    monkeypatch.undo()
    expected = compare({"kfac": fl.KFAC(lr=[1e-2])}, setting)["kfac"]
    torch.testing.assert_close(found.G, expected.G, rtol=1e-9, atol=1e-9)


def test_divergence_has_the_number_of_its_iteration(taped, monkeypatch, untyped):
    setting = dataclasses.replace(SMALL, scale="none")
    algorithms = {"sgd": fl.SGD(lr=[1e-9, 1e-1, 1.0]), "amgd": fl.AMGD(lr=[1e-6])}
    found = compare(algorithms, setting, together=2)
    monkeypatch.undo()
    expected = compare(algorithms, setting)
    assert (expected["sgd"].diverged_at[:, 1:] > 2).all()
    for name, result in found.items():
        assert torch.equal(result.diverged_at, expected[name].diverged_at)
        torch.testing.assert_close(result.G, expected[name].G, rtol=1e-9, atol=1e-9)


def test_one_rate_does_not_move_the_start_of_others(taped, untyped):
    """With a single rate the weights of all algorithms begin as one tensor."""
    found = compare({"a": fl.SGD(lr=1e-2), "b": fl.SGD(lr=1e-2)}, together=2)
    assert torch.equal(found["a"].G, found["b"].G)
    assert not torch.equal(found["a"].dist[:, 0], found["a"].dist[:, -1])


@pytest.mark.parametrize("data", ["uniform", "gaussian"])
def test_a_feed_brings_what_batches_are_drawn_of(monkeypatch, data):
    monkeypatch.setattr(runs, "together_on", lambda device, seeds: seeds > 1)
    group = Group(dataclasses.replace(SMALL, data=data), (4, 7), "cpu", torch.float64)
    with drawers(2) as pool:
        feed = Feed(group, ("first", "second"), 7, pool)
        for t in range(1, 8):
            feed.bring(t)
            for place, name in enumerate(("first", "second")):
                drawn: list[Any] = [piece() for piece in group.ask(None, t, name)]
                assert torch.equal(feed.numbers.u[place], torch.stack([one.u for one in drawn]))
                assert torch.equal(feed.numbers.noise[place], torch.stack([one.noise for one in drawn]))
                assert feed.seeds[place] == [one.seed for one in drawn]


def test_what_is_recorded_is_known_by_its_own_class():
    assert recordable(fl.NGD())
    assert recordable(fl.AMGD(norm="whiten_pop"))
    assert not recordable(Heir())
    assert not any(recordable(fl.ALGORITHMS[name]) for name in ("ekfac", "shampoo", "spectral", "mahalanobis_spectral"))
