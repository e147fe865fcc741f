"""Panels inside a page: what is drawn stands where its numbers say, and the script of the page gets the same ones."""

import itertools
import json
import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.report.palette import HUES, looks
from layerwise.report.pictures import MOST_SEEDS, OF_SEEDS, POINTS, picture
from layerwise.report.plots import HEIGHT, WIDTH, Axis, plot
from layerwise.report.ticks import places


def panel(*curves, **changes):
    return Panel(**({"title": "a <b>", "x_label": "x & y", "y_label": "loss", "curves": curves} | changes))


def drawn(given):
    """The plot of a panel, as a tree and as it is."""
    made = plot(given, looks(curve.label for curve in given.curves), "p", "what is seen")
    return ET.fromstring(made.svg), made


def spots(path):
    """The corners of a path of M and l."""
    at, found = np.zeros(2), []
    for pen, x, y in re.findall(r"([Ml])(-?[\d.]+?(?=[ -]))[ ]?(-?[\d.]+)", path):
        at = np.array([float(x), float(y)]) + (at if pen == "l" else 0)
        found.append(at)
    return np.array(found)


def axis(given):
    return Axis("log" if given[0] else "linear", *given[1:], ticks=())


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_a_line_goes_where_its_numbers_are(scale):
    x, y = [1, 2, 5, 9], [1.0, 0.2, 0.4, 0.03]
    tree, made = drawn(panel(Curve(label="KFAC", x=x, y=y), x_scale=scale, y_scale=scale))
    (line,) = [one for one in tree.iter("path") if one.get("class") == "line"]
    place, value = axis(made.data["place"]), axis(made.data["value"])
    expected = np.stack([place.at(np.array(x, dtype=float)), value.at(np.array(y))], 1)
    assert spots(line.get("d")) == pytest.approx(expected, abs=0.11)
    assert (expected > 0).all()
    assert (expected < [WIDTH, HEIGHT]).all()
    assert value.at(0.2) > value.at(1.0)  # larger values stand higher


def test_points_on_a_straight_line_are_left_out_and_corners_are_kept():
    x = list(range(101))
    tree, _ = drawn(panel(Curve(label="KFAC", x=x, y=[abs(k - 50) for k in x])))
    (line,) = [one for one in tree.iter("path") if one.get("class") == "line"]
    assert len(spots(line.get("d"))) == 3


def test_a_gap_breaks_the_line():
    tree, made = drawn(panel(Curve(label="KFAC", x=[0, 1, 2, 3], y=[1.0, math.nan, 2.0, 1.0])))
    (line,) = [one for one in tree.iter("path") if one.get("class") == "line"]
    assert line.get("d").count("M") == 2
    assert made.notes == ("KFAC: 1 of 4 points not shown (not finite).",)


def test_a_band_spans_its_edges():
    curve = Curve(label="KFAC", x=[0, 1], y=[2.0, 3.0], low=[1.0, 2.0], high=[4.0, 5.0])
    tree, made = drawn(panel(curve))
    (band,) = [one for one in tree.iter("path") if one.get("class") == "band"]
    heights = spots(band.get("d").split("L")[0])[:, 1]
    assert heights == pytest.approx(axis(made.data["value"]).at(np.array([4.0, 5.0])), abs=0.11)
    assert made.data["curves"][0]["low"] == [1, 2]


def test_named_bars_lie_beside_their_names_and_end_at_their_values():
    values = {"KFAC": 2.0, "SGD": 1.0, "Adam": -0.5}
    bars = [Curve(label=name, x=[k], y=[v], style="bars") for k, (name, v) in enumerate(values.items())]
    tree, made = drawn(panel(*bars))
    boxes = [one for one in tree.iter("rect") if one.get("rx")]
    value, place = axis(made.data["value"]), axis(made.data["place"])
    for box, (k, v) in zip(boxes, enumerate(values.values()), strict=True):
        left, width = float(box.get("x")), float(box.get("width"))
        assert sorted([left, left + width]) == pytest.approx(sorted([value.at(0.0), value.at(v)]), abs=0.11)
        assert float(box.get("y")) + float(box.get("height")) / 2 == pytest.approx(place.at(k), abs=0.11)
    words = [one.text for one in tree.iter("text")]
    assert [word for word in words if word in values] == list(values)


def test_bars_that_share_a_place_stand_side_by_side():
    bars = [Curve(label=name, x=[0, 1], y=[1.0, 2.0], style="bars") for name in ("KFAC", "SGD")]
    tree, _ = drawn(panel(*bars, places=["one", "two"]))
    boxes = sorted((float(one.get("y")), float(one.get("height"))) for one in tree.iter("rect") if one.get("rx"))
    assert len(boxes) == 4
    assert all(top + size <= below + 0.2 for (top, size), (below, _) in itertools.pairwise(boxes))


def test_lines_over_short_names_go_from_left_to_right():
    curve = Curve(label="KFAC", x=[0, 1, 2], y=[1.0, 2.0, 4.0])
    assert drawn(panel(curve, places=["0", "50", "<100>"]))[1].data["turned"] == 0
    assert "<100>" in [one.text for one in drawn(panel(curve, places=["0", "50", "<100>"]))[0].iter("text")]
    assert drawn(panel(curve, places=[f"a long name of place {k}" for k in range(3)]))[1].data["turned"] == 1


def test_a_long_name_of_a_place_is_cut_and_stays_inside():
    tree, made = drawn(panel(Curve(label="W" * 90, x=[0], y=[1.0], style="bars")))
    (name,) = [one.text for one in tree.iter("text") if "W" in one.text]
    assert name.endswith("…")
    assert made.data["value"][3] < 0.55 * WIDTH
    assert made.data["names"] == ["W" * 90]


def test_a_drawing_follows_the_page_and_its_letters_are_letters():
    tree, made = drawn(panel(Curve(label="KFAC <&> $x$", x=[0, 1], y=[1.0, 2.0])))
    assert "var(--hue-blue)" in made.svg
    assert not any(colour in made.svg for pair in HUES.values() for colour in pair)
    assert tree.find("title").text == "a <b>"
    assert tree.find("desc").text == "what is seen"
    assert tree.get("aria-labelledby") == tree.find("title").get("id")
    assert "x & y" in [one.text for one in tree.iter("text")]


@pytest.mark.parametrize("curves", [(), (Curve(label="a", x=[], y=[]),), (Curve(label="a", x=[1], y=[math.nan]),)])
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_a_panel_with_nothing_says_so(curves, scale):
    tree, _ = drawn(panel(*curves, y_scale=scale, x_scale=scale))
    assert [one.text for one in tree.iter("text")] == ["no data yet"]


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("y", [[5.0], [5.0, 5.0], [1e-300, 1e300], [1e-12, 1e-12], [-1e9, 1e9], [0.9991, 0.9992]])
def test_extreme_values_are_drawn(y, scale):
    if scale == "log":
        y = [abs(v) for v in y]
    tree, made = drawn(panel(Curve(label="a", x=list(range(len(y))), y=y), y_scale=scale))
    assert "nan" not in made.svg
    assert "inf" not in made.svg
    assert len(list(tree.iter("text"))) > 3


@pytest.mark.parametrize(
    ("low", "high", "scale"),
    [
        (0.0, 1.0, "linear"),
        (-3.3, 7.1, "linear"),
        (1e6, 1e6 + 3, "linear"),
        (2e-7, 9e-7, "linear"),
        (1e-9, 1.0, "log"),
        (0.07, 0.11, "log"),
        (0.3, 20.0, "log"),
        (1e-200, 1e200, "log"),
        (0.99, 0.995, "log"),
    ],
)
def test_ticks_lie_on_the_axis_and_say_where(low, high, scale):
    found = places(low, high, scale)
    assert 2 <= len(found) <= 9
    assert all(low * (1 - 1e-9) <= value <= high * (1 + 1e-9) or scale == "linear" for value, _ in found)
    assert [value for value, _ in found] == sorted({value for value, _ in found})
    assert len({label for _, label in found}) == len(found)


def figures(seeds, count=20, curves=2):
    """A figure of the means over seeds and one of each seed, whose curves differ by the seed."""

    def made(level):
        x = list(range(count))
        given = [Curve(label=f"c{k}", x=x, y=[level + k + 1.0 / (i + 1) for i in x]) for k in range(curves)]
        return Figure(name="f", title="t", caption="", panels=[panel(*given)])

    return made(10.0), {seed: made(float(seed)) for seed in seeds}


def test_the_script_gets_the_numbers_of_all_seeds_and_of_each():
    whole, singles = figures([3, 5])
    data = json.loads(picture(whole, "p", singles).data)
    assert data["seeds"] == [3, 5]
    curve = data["panels"][0]["curves"][1]
    assert data["panels"][0]["xs"] == [list(range(20))]  # once for all
    assert curve["y"][0] == 12
    assert [single[1][0] for single in curve["seeds"]] == [5, 7]


def test_one_seed_is_no_choice_and_figures_that_differ_in_kind_are_not_mixed():
    whole, singles = figures([3])
    assert json.loads(picture(whole, "p", singles).data)["seeds"] == []
    other = Figure(name="f", title="t", caption="", panels=[panel(title="another")])
    assert json.loads(picture(whole, "p", {0: other, 1: other}).data)["seeds"] == []


def test_a_legend_shows_lines_and_points_and_leaves_bars_to_their_names():
    bar = Curve(label="KFAC", x=[0], y=[1.0], style="bars")
    line = Curve(label="KFAC", x=[0, 1], y=[1.0, 2.0])
    both = Figure(name="f", title="t", caption="", panels=[panel(bar), panel(line)])
    (entry,) = picture(both, "p").legend
    assert 'class="line"' in entry.svg
    assert picture(Figure(name="f", title="t", caption="", panels=[panel(bar)]), "p").legend == ()


def test_a_name_cannot_end_the_element_that_holds_the_numbers():
    whole = Figure(name="f", title="t", caption="", panels=[panel(Curve(label="</script><b>", x=[0, 1], y=[1, 2]))])
    made = picture(whole, "p")
    assert "<" not in made.data
    assert json.loads(made.data)["labels"] == ["</script><b>"]


def test_numbers_of_long_curves_are_thinned_and_keep_their_last():
    whole, singles = figures(range(40), count=500, curves=8)
    made = picture(whole, "p", singles)
    data = json.loads(made.data)
    (shown,) = data["panels"]
    assert sum(len(curve["y"]) for curve in shown["curves"]) <= POINTS + 8
    assert sum(len(single[1]) for curve in shown["curves"] for single in curve["seeds"]) <= OF_SEEDS + 8 * MOST_SEEDS
    assert shown["xs"][0][-1] == 499
    assert len(made.data) < 40_000
