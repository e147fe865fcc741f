"""Colours: far enough from the page and from one another, also for the colour-blind; one for each algorithm."""

import itertools

import numpy as np
import pytest

from layerwise.report.palette import HUES, PAPER, Look, algorithm, look, looks

# Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision deficiency" (2009),
# severity 1; they act on linear RGB.
SIGHT = {
    "ordinary": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
OKABE_ITO = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")


def linear(colour: str) -> np.ndarray:
    c = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    low, high = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (high + 0.05) / (low + 0.05)


def oklab(rgb: np.ndarray) -> np.ndarray:
    to_cone = [[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]
    to_lab = [[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]
    return np.array(to_lab) @ np.cbrt(np.array(to_cone) @ np.clip(rgb, 0, 1))


def closest(colours, sight) -> float:
    seen = [oklab(np.array(sight) @ linear(colour)) for colour in colours]
    return min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2))


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_hues_stand_out_from_the_page(theme):
    for name, pair in HUES.items():
        assert contrast(pair[theme], PAPER[theme]) >= 3, name


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("sight", SIGHT)
def test_hues_are_as_far_apart_as_those_of_okabe_and_ito(theme, sight):
    ours = closest([pair[theme] for pair in HUES.values()], SIGHT[sight])
    assert ours >= closest(OKABE_ITO, SIGHT[sight])


def test_algorithms_of_the_first_study_have_looks_of_their_own():
    names = ["sgd", "amgd", "dfw", "kfac", "ngd", "adam", "amgd_bn", "altminmin"]
    assert len({look(name).hue for name in names}) == 8
    assert len({look(name).marker for name in names}) == 8


@pytest.mark.parametrize("label", ["kfac", "KFAC", "K-FAC", "KFAC, lr 1e-2", "KFAC (theory)", "trace/kfac"])
def test_a_name_has_one_look_however_it_is_spelled(label):
    assert look(label) == look("kfac")


def test_names_inside_other_names_are_kept_apart():
    assert algorithm("EKFAC") == "ekfac"
    assert algorithm("AMGD BN") == "amgd bn" != algorithm("AMGD")
    assert algorithm("sgd and adam") == "sgd"


def test_unknown_names_always_get_the_same_look():
    assert look("Width 64") == look("width 64") == Look("orange", "D")  # not even between versions of Python
    assert len({(look(f"run {k}").hue, look(f"run {k}").marker) for k in range(200)}) > 40


def test_curves_of_one_algorithm_differ_in_dash_and_marker():
    given = looks(["NGD 1e-2", "NGD 1e-3", "NGD 1e-4", "KFAC"])
    assert len({one.hue for one in given.values()}) == 2
    assert len({(one.hue, one.dash) for one in given.values()}) == 4
    assert len({one.marker for one in given.values()}) == 4


def test_no_two_curves_of_a_figure_look_alike():
    labels = [f"setting {k}" for k in range(25)]
    given = looks(labels)
    assert len({(one.hue, one.marker, one.dash) for one in given.values()}) == 25
