"""Comparisons of both objectives, rules that stop, steps by other optimizers, and theorems on small problems."""

import dataclasses

import pytest
import torch

from layerwise.foundations.errors import InputError
from layerwise.studies.masked_sparse_coding import steps, theorems
from layerwise.studies.masked_sparse_coding.comparison import Curves, Setting, compare
from layerwise.studies.masked_sparse_coding.stopping import kept

SMALL = Setting(d=20, p=20, k=2, n=60, sigma=0.1, atoms=30, batch=30, epochs=3, held_out=20)


def test_a_seed_does_not_depend_on_others():
    both, alone = compare(SMALL, [3, 4], every=1), compare(SMALL, [4], every=1)
    for name in ("standard", "masked"):
        pairs = zip(dataclasses.astuple(both[name][1]), dataclasses.astuple(alone[name][0]), strict=True)
        assert all(first == pytest.approx(second, abs=1e-5) for first, second in pairs)
    assert both["masked"][0].error[0] != both["masked"][1].error[0]


def test_both_objectives_start_alike_and_part():
    found = compare(SMALL, [0], every=1)
    standard, masked = found["standard"][0], found["masked"][0]
    assert standard.epoch == masked.epoch == [0, 1, 2, 3]
    assert (standard.error[0], standard.masked[0]) == (masked.error[0], masked.masked[0])
    assert standard.error[-1] != masked.error[-1]
    local = compare(dataclasses.replace(SMALL, start="local", held_out=0), [0], every=3)
    assert local["masked"][0].error[0] == pytest.approx(0, abs=1e-6)
    assert local["masked"][0].masked == []


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"precision": "half"}, "Available: double, single"),
        ({"start": "local", "atoms": 10}, "at least as many"),
        ({"k": 19}, "a smaller k"),
    ],
)
def test_settings_that_cannot_be(changed, says):
    with pytest.raises(InputError, match=says):
        dataclasses.replace(SMALL, **changed)


def test_rules():
    curves = Curves(epoch=[0, 5, 10, 15], masked=[9.0, 7.0, 8.0, 6.0], reconstruction=[3.0, 2.0, 1.0, 4.0])
    assert kept(curves, "masked", patience=1) == (1, 2)
    assert kept(curves, "masked", patience=2) == (3, 3)
    assert kept(curves, "reconstruction", patience=1) == (2, 3)
    assert kept(curves, "last", patience=1) == (3, 3)


def test_adam_on_a_layer_is_adam_on_the_stack():
    """Two implementations: hooks and autograd on a linear layer, and the stacked program (masks drawn alike)."""
    one = dataclasses.replace(SMALL, batch=60, precision="double", epochs=2)
    drawn: list[torch.Tensor] = []
    real = torch.randperm

    def same(n: int, *, generator: torch.Generator) -> torch.Tensor:
        if n != one.d or generator.device.type != "cpu":
            return real(n, generator=generator)
        drawn.append(torch.rand(1, n, generator=generator).topk(2, -1).indices[0])
        return drawn[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps.torch, "randperm", same)
        layer = steps.trained(one, "adam", 1e-3, 0, every=1)
    stack = compare(one, [0], every=1, objectives=("masked",))["masked"][0]
    assert drawn
    assert layer.error == pytest.approx(stack.error, abs=1e-9)


@pytest.mark.parametrize("method", ["kfac", "shampoo"])
def test_members_learn(method):
    found = steps.trained(dataclasses.replace(SMALL, epochs=4, n=120, sigma=0.02), method, 5e-3, 0, every=4)
    assert found.epoch == [0, 4]
    assert found.masked[1] < found.masked[0]


def test_the_wrong_dictionary_wins_without_masks_alone():
    found = theorems.wrong_dictionary(1, d=20, p=20, k=2, sigma=20**-0.5, directions=6, samples=300, masks=4, hidden=2)
    assert found["B"] < found["A, exhaustive"] <= found["A"]
    assert found["A, 2k"] < found["A"]
    assert found["masked/B"] > found["masked/A"] > found["floor"]
    assert found["distance/squared"] == pytest.approx(2 * found["distance/cosine"])


def test_excess_over_the_oracle():
    values, series = theorems.masking_theorem(
        0, d=120, visible=90, p=20, k=2, sigma=0.1, samples=800, signals=(0.3, 20.0)
    )
    assert 0 < values["incoherence"] < 1
    assert series["excess"][1] < 0.3 * series["excess"][0]
    assert series["recovered"][0] < series["recovered"][1]
    assert min(e + 3 * s for e, s in zip(series["excess"], series["error"], strict=True)) > 0
