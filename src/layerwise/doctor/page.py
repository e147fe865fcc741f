"""The page of a report: one file, in light and dark, with the look of the experiments' pages."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layerwise.doctor.findings import number
from layerwise.doctor.report import LAYER_COLUMNS, STEP_COLUMNS, Report, heading, layer_row, step_row
from layerwise.foundations.errors import FileFormatError, describe
from layerwise.foundations.optional import require
from layerwise.report.palette import HUES, PAPER, css_name

TEMPLATES = Path(__file__).parent / "templates"
SHARED = Path(__file__).parents[1] / "report" / "templates"
BARS = 40
"""Layers that a figure has at most."""
ROW, LABEL, WIDTH = 22, 190, 720


def save(report: Report, path: Path) -> Path:
    """Write the page and give its path."""
    text = render(report)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise FileFormatError(
            describe(
                f"{path}, where the page could not be written ({error.strerror or error})",
                "a file that can be written",
                "choose another path",
            )
        ) from error
    return path


def render(report: Report) -> str:
    """The page as text."""
    jinja2 = require("jinja2", "jinja2", "the doctor's page", extra="report")
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader([TEMPLATES, SHARED]),
        autoescape=True,  # a name with < or & stays a name
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["coded"] = _coded
    made.globals["hues"] = {css_name(hue): pair for hue, pair in HUES.items() if hue != "ink"}
    made.globals["ink"], made.globals["paper"] = HUES["ink"], PAPER
    m = report.measured
    counts = {name: sum(f.severity == name for f in report.findings) for name in ("severe", "moderate", "note")}
    return (
        made.get_template("doctor.html.j2").render(
            heading=heading(report),
            findings=[
                {"finding": finding, "gain": number(finding.gain, 2), "badge": BADGES[finding.severity]}
                for finding in report.findings
            ],
            counts=[(name, count, BADGES[name]) for name, count in counts.items() if count],
            figures=_figures(report),
            layer_columns=LAYER_COLUMNS,
            layers=[layer_row(layer) for layer in m.layers],
            step_columns=STEP_COLUMNS,
            steps=[step_row(step) for step in m.steps],
            sites=[
                (s.module or "the model", s.function, s.units, *(f"{100 * v:.0f} %" for v in (s.dead, s.saturated)))
                for s in m.sites
            ],
            facts=_facts(report),
            notes=m.notes,
            took=f"{report.took:.1f}",
        )
        + "\n"
    )


BADGES = {"severe": "failed", "moderate": "few", "note": "note"}


def _figures(report: Report) -> list[dict[str, Any]]:
    layers = [layer for layer in report.measured.layers if layer.inputs is not None and layer.outgrads is not None]
    layers = layers[:BARS]
    found = []
    if layers:
        names = [layer.name for layer in layers]
        conditions = [
            ("inputs", "blue", [layer.inputs.condition for layer in layers if layer.inputs]),
            ("output gradients", "orange", [layer.outgrads.condition for layer in layers if layer.outgrads]),
        ]
        found.append(
            {
                "title": "Condition of what layers see",
                "legend": [("inputs", "blue"), ("output gradients", "orange")],
                "svg": _dots(names, conditions, "condition (logarithmic)"),
                "caption": "Largest over smallest eigenvalue of the second moment. Gradient descent needs about so "
                "many steps along the flattest direction.",
            }
        )
        total = sum(layer.reach for layer in report.measured.layers) or 1.0
        shares = [
            ("curvature", "green", [layer.curvature_share for layer in layers]),
            ("predicted decrease", "pink", [layer.reach / total for layer in layers]),
        ]
        found.append(
            {
                "title": "Where the curvature is, and where there is something to gain",
                "legend": [("share of curvature", "green"), ("share of predicted decrease", "pink")],
                "svg": _bars(names, shares),
                "caption": "Shares of the trace of the Fisher matrix, and of the decrease that each layer's own "
                "preconditioned step predicts.",
            }
        )
    steps = report.measured.steps
    if steps:
        values = [
            ("predicted", "blue", [step.predicted for step in steps]),
            ("measured", "sand", [max(step.measured or 0.0, 0.0) for step in steps]),
        ]
        top = max(step.predicted for step in steps) or 1.0
        found.append(
            {
                "title": "What a step of each optimizer would do",
                "legend": [("predicted decrease", "blue"), ("measured decrease", "sand")],
                "svg": _bars(
                    [step.name for step in steps],
                    [(label, hue, [value / top for value in row]) for label, hue, row in values],
                    unit=top,
                ),
                "caption": "At the rate that the quadratic model finds best. A measured decrease of nothing means that "
                "the loss did not fall: the step is larger than the model is good for.",
            }
        )
    return found


Series = Sequence[tuple[str, str, Sequence[float]]]


def _bars(names: Sequence[str], series: Series, unit: float = 1.0) -> str:
    """Two horizontal bars for each name, shares of the width; what they are beside them."""
    room = WIDTH - LABEL - 120
    largest = max((value for _, _, values in series for value in values), default=1.0) or 1.0
    parts = []
    for row, name in enumerate(names):
        y, shown, end = row * ROW, [], 0.0
        parts.append(_label(name, y))
        for place, (label, hue, values) in enumerate(series):
            length = max(room * values[row] / largest, 0.0)
            words = number(values[row] * unit, 2) if unit != 1.0 else f"{100 * values[row]:.1f} %"
            parts.append(
                f'<rect x="{LABEL}" y="{y + 3 + 8 * place}" width="{length:.1f}" height="7" '
                f'style="fill:var({css_name(hue)})"><title>{_escaped(name)}, {label}: {words}</title></rect>'
            )
            shown.append(words)
            end = max(end, length)
        parts.append(f'<text x="{LABEL + end + 6:.1f}" y="{y + 14}" class="tick">{" · ".join(shown)}</text>')
    return _svg(parts, len(names) * ROW, "bars: " + " and ".join(label for label, _, _ in series))


def _dots(names: Sequence[str], series: Series, axis: str) -> str:
    """A dot for every value, on a logarithmic axis."""
    finite = [value for _, _, values in series for value in values if value > 0 and math.isfinite(value)]
    low, high = 0.0, max(math.ceil(math.log10(max(finite, default=10.0))), 1)
    room = WIDTH - LABEL - 20

    def place(value: float) -> float:
        return LABEL + room * (min(max(math.log10(value), low), high) - low) / (high - low)

    bottom = len(names) * ROW
    parts = []
    step = max(1, int(high) // 6)
    for decade in range(0, int(high) + 1, step):
        x = place(10.0**decade)
        parts.append(f'<path d="M{x:.1f} 0V{bottom}" style="stroke:var(--grid)"/>')
        label = f"10{str(decade).translate(SUPERSCRIPT)}"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" class="tick" text-anchor="middle">{label}</text>')
    for row, name in enumerate(names):
        y = row * ROW
        parts.append(_label(name, y))
        for label, hue, values in series:
            value = values[row]
            if not (value > 0 and math.isfinite(value)):
                continue
            title = f"<title>{_escaped(name)}, {label}: {number(value, 2)}</title>"
            fill, x = f"fill:var({css_name(hue)})", place(value)
            if label == "inputs":
                parts.append(f'<circle cx="{x:.1f}" cy="{y + 11}" r="5" style="{fill}">{title}</circle>')
            else:  # a square, so that colour is not the only difference
                parts.append(f'<rect x="{x - 4:.1f}" y="{y + 7}" width="8" height="8" style="{fill}">{title}</rect>')
    parts.append(f'<text x="{WIDTH - 20}" y="{bottom + 34}" class="tick" text-anchor="end">{axis}</text>')
    return _svg(parts, bottom + 40, axis)


SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def _svg(parts: Sequence[str], height: int, label: str) -> str:
    return (
        f'<svg class="panel" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{_escaped(label)}">'
        + "".join(parts)
        + "</svg>"
    )


def _label(name: str, y: int) -> str:
    short = name if len(name) <= 26 else "…" + name[-25:]
    text = f"{_escaped(short)}<title>{_escaped(name)}</title>"
    return f'<text x="{LABEL - 8}" y="{y + 15}" class="name" text-anchor="end">{text}</text>'


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _coded(text: str) -> Any:
    """Text with names between backticks as code."""
    markup = require("markupsafe", "jinja2", "the doctor's page", extra="report")
    parts = (str(markup.escape(part)) for part in text.split("`"))
    return markup.Markup("".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts)))


def _facts(report: Report) -> list[tuple[str, str]]:
    """What was seen of the data, and how long each part took."""
    m = report.measured
    facts = [("loss", f"{number(m.loss)} ± {number(m.loss_se, 1)}"), ("likelihood", m.likelihood)]
    if m.inputs is not None:
        x = m.inputs
        facts += [
            ("input features", f"{x.features}, {100 * x.constant:.3g} % of them constant"),
            ("their standard deviations", f"{number(x.smallest_std)} to {number(x.largest_std)}"),
            ("their mean", f"{number(x.offset)} standard deviations from zero (median)"),
        ]
    if m.targets is not None:
        y = m.targets
        if y.kind == "classes":
            largest, smallest = (100 * (v or 0.0) for v in (y.largest_class, y.smallest_class))
            facts.append(("classes", f"{y.classes}, from {smallest:.3g} % to {largest:.3g} % of the labels"))
        elif y.kind == "values":
            facts.append(("targets", f"mean {number(y.mean)}, root mean square {number(y.rms)}"))
        if y.shuffled_z is not None:
            facts.append(("kernel and targets", f"aligned {number(y.shuffled_z, 2)} σ above shuffled targets"))
    if m.own_step is not None:
        own = m.own_step
        facts.append(
            (f"next step of {own.name}", f"rate {number(own.rate)}, best {number(own.rate * own.best_multiple, 2)}")
        )
    facts += [(f"time for {part}", f"{spent:.1f} s") for part, spent in m.seconds.items()]
    return facts
