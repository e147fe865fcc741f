"""What a panel declares is what is drawn, and what cannot be drawn is said."""

import itertools
import math
from dataclasses import replace

import matplotlib
import matplotlib.figure
import numpy as np
import pytest

from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.over_seeds import bars
from layerwise.report.drawing import draw, style
from layerwise.report.palette import HUES, looks
from layerwise.report.pictures import save
from layerwise.report.ticks import decade


def panel(*curves, **changes):
    return Panel(**({"title": "t", "x_label": "x", "y_label": "y", "curves": curves} | changes))


def drawn(given):
    """The axes of a panel, drawn, and its notes."""
    with style(text=True):
        whole = matplotlib.figure.Figure(layout="constrained")
        axes = whole.subplots()
        notes = draw(axes, given, looks(curve.label for curve in given.curves))
        whole.canvas.draw()
        return axes, notes


def test_a_curve_keeps_its_points_its_colour_and_its_band():
    curve = Curve(label="KFAC", x=[0, 1, 2], y=[3.0, 2.0, 1.0], low=[2.5, 1.5, 0.5], high=[3.5, 2.5, 1.5])
    axes, notes = drawn(panel(curve))
    (line,) = axes.lines
    assert not notes
    assert line.get_xydata().tolist() == [[0, 3], [1, 2], [2, 1]]
    assert line.get_color() == HUES["blue"][0]
    (band,) = axes.collections
    edges = band.get_paths()[0].vertices
    assert (edges[:, 1].min(), edges[:, 1].max()) == (0.5, 3.5)


def test_scales_are_those_declared():
    curve = Curve(label="KFAC", x=[1e-6, 1e-3, 1.0], y=[1.0, 0.1, 1e-4])
    axes, _ = drawn(panel(curve, x_scale="log", y_scale="log"))
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert "10⁻⁴" in labels
    assert "1" in labels


def test_a_logarithmic_axis_of_less_than_a_decade_has_numbers():
    axes, _ = drawn(panel(Curve(label="KFAC", x=[0, 1], y=[0.074, 0.11]), y_scale="log"))
    low, high = axes.get_ylim()
    shown = [t.get_text() for v, t in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True) if low <= v <= high]
    assert len([text for text in shown if text]) >= 2


def test_styles():
    curves = [Curve(label=kind, x=[0, 1], y=[1.0, 2.0], style=kind) for kind in ("line", "points", "dashed")]
    axes, _ = drawn(panel(*curves))
    line, points, dashed = axes.lines
    assert line.get_linestyle() == "-"
    assert points.get_linestyle() == "None"
    assert points.get_marker() != "None"
    assert dashed.get_linestyle() == "--"
    assert dashed.get_marker() == "none"


@pytest.mark.parametrize(("places", "width"), [(([0, 1], [0, 1]), 0.5), (([0], [1]), 0.9)])
def test_bars_stand_side_by_side_only_where_they_share_a_place(places, width):
    axes, _ = drawn(panel(*(Curve(label=f"b{k}", x=x, y=[1.0] * len(x), style="bars") for k, x in enumerate(places))))
    spans = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches)
    assert all(left[1] <= right[0] + 1e-9 for left, right in itertools.pairwise(spans))
    assert all(0.5 * width < end - start < width for start, end in spans)


@pytest.mark.parametrize(
    ("y", "scale", "words"),
    [
        ([1.0, math.nan, 2.0], "linear", "KFAC: 1 of 3 points not shown (not finite)."),
        ([1.0, 0.0, -1.0], "log", "2 of 3 points not shown (not finite, or not above zero on a logarithmic axis)."),
        ([math.inf] * 3, "linear", "3 of 3 points not shown"),
    ],
)
def test_points_left_out_are_counted(y, scale, words):
    _, (note,) = drawn(panel(Curve(label="KFAC", x=[0, 1, 2], y=y), y_scale=scale))
    assert words in note


@pytest.mark.parametrize("curves", [(), (Curve(label="a", x=[], y=[]),), (Curve(label="a", x=[1], y=[math.nan]),)])
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_a_panel_with_nothing_says_so(curves, scale):
    axes, _ = drawn(panel(*curves, y_scale=scale, x_scale=scale))
    assert [text.get_text() for text in axes.texts] == ["no data yet"]


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("y", [[5.0], [5.0, 5.0], [1e-300, 1e300], [1e-12, 1e-12]])
def test_extreme_values_are_drawn(y, scale):
    axes, notes = drawn(panel(Curve(label="a", x=list(range(len(y))), y=y), y_scale=scale))
    assert np.isfinite(axes.get_ylim()).all()
    assert notes == (["2 points lie beyond the ends of the y axis."] if scale == "log" and max(y) > 1e200 else [])


def test_a_run_that_explodes_hides_no_other():
    calm = Curve(label="KFAC", x=list(range(30)), y=[1.0 / (k + 1) for k in range(30)])
    wild = Curve(label="SGD", x=[0, 1, 2], y=[1.0, 1e20, 1e200])
    axes, (note,) = drawn(panel(*(replace(calm, label=f"calm {k}") for k in range(5)), wild, y_scale="log"))
    low, high = axes.get_ylim()
    assert low < 1 / 30
    assert 1 < high < 1e6
    assert note == "2 points lie beyond the ends of the y axis."


def test_a_curve_that_converges_is_seen_to_its_end():
    steps = list(range(100))
    axes, notes = drawn(panel(Curve(label="KFAC", x=steps, y=[10.0 ** (-0.16 * k) for k in steps]), y_scale="log"))
    low, high = axes.get_ylim()
    assert not notes
    assert low <= 10.0 ** (-0.16 * 99)
    assert high >= 1


def test_a_decade_is_labelled_and_nothing_between():
    assert [decade(10.0**k, plain=False) for k in (-3, 0, 3)] == ["10⁻³", "1", "10³"]
    assert [decade(10.0**k, plain=True) for k in (-2, 0, 4)] == ["0.01", "1", "10000"]
    assert decade(2.0, True) == decade(0.0, True) == decade(-1.0, False) == ""


def figure(label="KFAC <&> $x$"):
    curve = Curve(label=label, x=list(range(50)), y=[1.0 / (k + 1) for k in range(50)])
    given = panel(curve, title="a <b>", x_label="x & y", y_scale="log")
    return Figure(name="f", title="t", caption="c", panels=[given, given])


def test_files_for_papers_and_the_same_bytes_again(tmp_path):
    (tmp_path / "again").mkdir()
    for path in save(figure(), tmp_path, "f"):
        content = path.read_bytes()
        assert content.startswith({".svg": b"<?xml", ".pdf": b"%PDF", ".png": b"\x89PNG"}[path.suffix])
        assert len(content) > 3000
    for path in save(figure(), tmp_path / "again", "f"):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_settings_of_matplotlib_are_left_as_they_were(tmp_path):
    before = dict(matplotlib.rcParams)
    save(figure(), tmp_path, "f")
    assert dict(matplotlib.rcParams) == before


def words_along_x(axes):
    return [text.get_text() for text in axes.get_xticklabels()]


def test_bars_with_a_place_each_are_named_along_the_axis():
    bars = [Curve(label=name, x=[place], y=[1.0], style="bars") for place, name in enumerate(["KFAC", "SGD", "Adam"])]
    axes, _ = drawn(panel(*bars))
    assert words_along_x(axes) == ["KFAC", "SGD", "Adam"]


def test_places_are_named_as_declared():
    curve = Curve(label="as printed", x=[0, 1], y=[1.0, 2.0], style="points")
    axes, _ = drawn(panel(curve, places=["Lemma 3.7", "eq. (16)"]))
    assert words_along_x(axes) == ["Lemma 3.7", "eq. (16)"]
    low, high = axes.get_xlim()
    assert low < 0
    assert high > 1


def test_bars_at_numbers_keep_their_numbers():
    bars = [Curve(label=name, x=[10, 20], y=[1.0, 2.0], style="bars") for name in ("KFAC", "SGD")]
    axes, _ = drawn(panel(*bars))
    assert "KFAC" not in words_along_x(axes)


def test_a_bar_that_is_missing_takes_no_names_away():
    values = {"KFAC": 1.0, "SGD": math.inf, "Adam": 2.0}
    records = [{"cell": "a", "seed": 0, "values": values, "series": {}}]
    axes, notes = drawn(panel(*bars(records, "a", {name: name for name in values})))
    assert words_along_x(axes) == ["KFAC", "SGD", "Adam"]
    assert any("SGD" in note for note in notes)


def test_whiskers_stand_on_their_bars():
    curves = [
        Curve(label=name, x=[0, 1], y=[1.0, 2.0], low=[0.5, 1.5], high=[1.5, 2.5], style="bars")
        for name in ("KFAC", "SGD")
    ]
    axes, _ = drawn(panel(*curves))
    middles = sorted(bar.get_x() + bar.get_width() / 2 for bar in axes.patches)
    whiskers = sorted(segment[0][0] for lines in axes.collections for segment in lines.get_segments())
    assert whiskers == pytest.approx(middles)
