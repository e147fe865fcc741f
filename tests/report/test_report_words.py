"""Numbers, verdicts and commands in words."""

import math
import re
import shlex
from dataclasses import dataclass, field, replace

import pytest
from report_samples import Config, experiment

from layerwise.experiments.claims import Claim, judge
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.report import wording
from layerwise.report.commands import run_command
from layerwise.report.gather import Judged
from layerwise.report.strips import strip
from layerwise.report.views import claim_row, paired, paragraphs, slug, tables, tally


def claim(**changes):
    standard = {"name": "c", "statement": "s", "relation": "<=", "target": 0.1, "seeds": 2}
    return Claim(**(standard | {"quantity": lambda records: {r["seed"]: r["v"] for r in records}} | changes))


def judged(values, **changes):
    made = claim(**changes)
    records = [{"seed": seed, "v": value} for seed, value in enumerate(values)]
    return Judged(claim=made, verdict=judge(made, records))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.1, "0.1"),
        (1234.5, "1234"),
        (-0.05, "−0.05"),
        (1e-9, "1 × 10⁻⁹"),
        (-3.14159e21, "−3.14 × 10²¹"),
        (0, "0"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
    ],
)
def test_numbers(value, shown):
    assert wording.number(value) == shown


@pytest.mark.parametrize(
    ("values", "changes", "outcome"),
    [
        ([0.05, 0.06], {}, "held"),
        ([0.05, 0.2], {}, "failed"),
        ([0.05], {}, "few"),
        ([0.5, 0.5], {"expected": "fails", "why": "e"}, "known"),
        ([0.5, 0.5], {"expected": "fails", "why": "e", "origin": "misprint", "source": "eq. (1)"}, "misprint"),
        ([0.05, 0.05], {"expected": "fails", "why": "e"}, "surprise"),
        ([math.nan, math.nan], {"expected": "fails", "why": "e"}, "failed"),
        ([math.nan, 0.0], {}, "failed"),
    ],
)
def test_outcomes(values, changes, outcome):
    row = claim_row(judged(values, **changes))
    assert row.outcome == outcome
    assert row.verdict == wording.OUTCOMES[outcome]
    assert row.n == len(values)


def test_a_claim_that_cannot_be_judged_says_why():
    row = claim_row(Judged(claim=claim(), trouble="Got x. Expected y. Z."))
    assert (row.outcome, row.detail) == ("error", "Got x. Expected y. Z.")


def test_a_row_has_the_numbers_of_its_verdict():
    row = claim_row(judged([0.02, 0.04], relation="within", target=(0.01, 0.05), test="share", share=0.5))
    assert (row.mean, row.spread, row.target, row.whom) == (
        "0.03",
        "0.02 to 0.04",
        "in [0.01, 0.05]",
        "50 % of the seeds",
    )
    assert (row.interval, row.counted) == ("–", "2 of 2 (16 to 100 %)")  # of two seeds the values are shown


def test_tallies_count_each_outcome():
    rows = [claim_row(judged(values)) for values in ([0.0, 0.0], [1.0, 1.0], [0.0, 0.05], [0.0])]
    assert tally(rows) == [("held", 2, "held"), ("failed", 1, "failed"), ("few", 1, "not enough runs")]


@pytest.mark.parametrize("relation", ["<=", ">=", "<", ">"])
def test_a_strip_has_a_dot_a_seed_inside_the_drawing(relation):
    drawn = strip(claim(relation=relation), [1e-5, 0.02, 3.0, math.inf])
    places = [float(place) for place in re.findall(r"M([\d.]+) 10h0", drawn)]
    assert len(places) == 3
    assert places == sorted(places)
    assert all(0 < place < 128 for place in places)


def test_a_strip_shades_the_side_where_the_claim_holds():
    def shaded(relation):
        drawn = strip(claim(relation=relation, target=0.5), [0.1, 0.9])
        start, width = (float(drawn.split(f'{name}="')[1].split('"')[0]) for name in ("rect x", "width"))
        del width
        return start

    assert shaded("<=") == 0
    assert shaded(">=") > 50


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Settings inside settings."""

    damping: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Wide(Config):
    """One field of each kind."""

    rates: tuple[float, ...] = (1e-2, 1e-3)
    name_of_it: str = "plain"
    limit: int | None = None
    inner: Inner = field(default_factory=Inner)


def test_the_command_names_what_differs_and_nothing_else():
    made = experiment()
    assert run_command(made, "paper", made.presets["paper"]) == "layerwise run sample-one --preset paper"
    changed = replace(made.presets["paper"], seeds=7, fresh=False, scales=("none", "trace"))
    assert (
        run_command(made, "paper", changed, engine="processes")
        == "layerwise run sample-one --preset paper --engine processes --seeds 7 --scales none trace --no-fresh"
    )
    assert run_command(made, "smoke", made.presets["smoke"], source="my.own:EXPERIMENT").startswith(
        "layerwise run my.own:EXPERIMENT --preset smoke"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"seeds": 9, "iterations": 17},
        {"fresh": False},
        {"scales": ("none", "max")},
        {"rates": (1e-6, 0.5, 3.0), "name_of_it": "two words; rm"},
        {"limit": 3, "inner": Inner(damping=1e-12)},
    ],
)
def test_the_command_gives_the_configuration_back(changes):
    """What the page prints is read by the command line as the configuration that was run."""
    pytest.importorskip("tyro")
    from layerwise.cli.run import _parse

    made = experiment(presets={name: Wide() for name in ("smoke", "laptop", "paper")})
    config = replace(Wide(), **changes)
    words = shlex.split(run_command(made, "paper", config))
    assert words[:3] == ["layerwise", "run", "sample-one"]
    options, parsed = _parse(made, words[3:])
    assert parsed == config
    assert options.preset == "paper"


def test_names_of_files_stay_inside_their_folder():
    assert slug("../../etc/<passwd>") == "etc-passwd"
    assert slug("///") == "figure"
    assert len(slug("a" * 500)) == 80


def test_paragraphs():
    assert paragraphs(" a\nb \n\n\n c ") == ["a b", "c"]
    assert paragraphs("") == []


def test_a_misprint_and_its_correction_are_a_pair_and_say_what_is_right_once():
    wrong = claim(name="p", expected="fails", why="It is b.", origin="misprint", source="eq. (1)", statement="It is a.")
    right, other = claim(name="q", statement="It is b."), claim(name="r", statement="Another.")
    rows = paired(
        [claim_row(Judged(claim=one, verdict=judge(one, []))) for one in (wrong, right, other)], [wrong, right, other]
    )
    assert [row.pair for row in rows] == ["printed", "corrected", ""]
    assert rows[0].why == ""
    (alone, _) = paired(
        [claim_row(Judged(claim=one, verdict=judge(one, []))) for one in (wrong, other)], [wrong, other]
    )
    assert alone.pair == ""
    assert alone.why == "What is right: It is b."


def test_columns_beside_a_verdict_are_not_said_again_but_oddities_are():
    assert claim_row(judged([0.05, 0.06])).detail == ""
    assert "not seed 1" in claim_row(judged([0.05, 0.2])).detail
    assert "seed 1 diverged" in claim_row(judged([0.05, None, 0.06])).detail


def test_a_table_of_values_has_the_first_and_the_last_point():
    long = Curve(label="KFAC", x=list(range(101)), y=[1.0 / (k + 1) for k in range(101)])
    short = Curve(label="floor", x=[0, 100], y=[0.5, 0.5])
    panel = Panel(title="t", x_label="step", y_label="loss", curves=[long, short, Curve(label="none", x=[], y=[])])
    (table,) = tables(Figure(name="f", title="t", caption="", panels=[panel]))
    assert table.heads == ("loss at step", "0", "20", "40", "60", "80", "100")
    assert table.rows == (
        ("KFAC", "1", "0.0476", "0.0244", "0.0164", "0.0123", "0.0099"),
        ("floor", "0.5", "–", "–", "–", "–", "0.5"),
    )


def test_a_table_of_named_places_has_a_row_a_name():
    points = [Curve(label=name, x=[0, 1], y=[1.0, k], style="points") for k, name in enumerate(("printed", "right"))]
    panel = Panel(title="t", x_label="", y_label="error", curves=points, places=["Lemma 1", "eq. (2)"])
    (table,) = tables(Figure(name="f", title="t", caption="", panels=[panel]))
    assert table.heads == ("error", "printed", "right")
    assert table.rows == (("Lemma 1", "1", "1"), ("eq. (2)", "0", "1"))


def test_a_table_of_bars_has_their_ranges():
    bars = [
        Curve(label="KFAC", x=[0], y=[2], low=[1], high=[3], style="bars"),
        Curve(label="SGD", x=[1], y=[4], style="bars"),
    ]
    (table,) = tables(
        Figure(name="f", title="t", caption="", panels=[Panel(title="t", x_label="", y_label="loss", curves=bars)])
    )
    assert table.rows == (("KFAC", "2", "1 to 3"), ("SGD", "4", "–"))
