"""`Report`: what `lw.doctor` returns. Printed, saved as a page, or written as JSON."""

import dataclasses
import io
import json
import shutil
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerwise.doctor.findings import Finding, number
from layerwise.doctor.measurements import Layer, Measurements, Step

SHOWN = 24
"""Layers that a table on a terminal has at most; all are on the page and in the JSON document."""
STYLES = {"severe": "bold red", "moderate": "yellow", "note": "dim"}


@dataclass(frozen=True)
class Report:
    """Findings in the order in which they should be looked at, and all measurements."""

    measured: Measurements
    findings: list[Finding]
    """Severe ones first; among those of a severity, by predicted gain."""
    took: float
    """Seconds."""
    seconds: float
    """Seconds that were allowed."""

    def __str__(self) -> str:
        try:
            import rich  # noqa: F401
        except ImportError:
            return _plain(self)
        return _rich(self)

    def to_json(self) -> str:
        """Everything, as a JSON document; numbers that are not finite as ``{"float": "inf"}``."""
        from layerwise.experiments.records import to_plain

        return json.dumps(to_plain(dataclasses.asdict(self)), indent=2, ensure_ascii=False, allow_nan=False)

    def save_html(self, path: str | Path) -> Path:
        """Write a page that needs no network and no other file; gives its path."""
        from layerwise.doctor.page import save

        return save(self, Path(path))

    def severe(self) -> list[Finding]:
        """The severe ones."""
        return [finding for finding in self.findings if finding.severity == "severe"]


# --- words and numbers ------------------------------------------------------------------------------------------------


def heading(report: Report) -> str:
    """What was looked at, in a line."""
    m = report.measured
    if m.broken or m.broken_examples:
        return f"{m.parameters:,} parameters; the {'data' if m.broken_examples else 'output'} is not finite"
    constant = m.targets.constant_loss if m.targets is not None else None
    against = "" if constant is None else f" (best constant prediction: {number(constant)})"
    return (
        f"{m.parameters:,} parameters in {len(m.layers)} layers, {m.examples:,} examples, {m.likelihood} loss "
        f"{number(m.loss)} ± {number(m.loss_se, 1)}{against}"
    )


LAYER_COLUMNS = (
    ("layer", "Name; * where it is frozen"),
    ("params", "Number of parameters"),
    ("κ in", "Condition of the inputs' second moment"),
    ("rank in", "Its effective rank, of its size"),
    ("κ out", "Condition of the output gradients' second moment"),
    ("rank out", "Its effective rank, of its size"),
    ("rank one", "Part of the gradient's square in its largest singular value"),
    ("K-FAC err", "‖F − G⊗A‖/‖F‖ ± its standard error"),
    ("align", "CKA of the layer's tangent kernel with the targets"),
    ("noise", "Gradient noise scale, in examples"),
    ("curv %", "Part of the Fisher matrix's trace"),
    ("reach", "Decrease of the loss that a step with the layer's curvature predicts"),
    ("left %", "Part of it that 1000 steps of gradient descent do not reach"),
)
"""Names of the columns, and what they are."""
LEGEND = (
    "κ: condition, and rank: effective rank, of a layer's inputs (in) and output gradients (out); rank one: the "
    "gradient's largest singular value; align: with the targets; noise: in examples; curv: part of the curvature; "
    "reach: decrease that the layer's K-FAC step predicts; left: part of it that 1000 steps of SGD do not reach. "
    "report.save_html(path) explains and shows everything on a page."
)
"""The columns in a sentence, below the table on a terminal."""


def layer_row(layer: Layer) -> list[str]:
    """A layer as the cells of `LAYER_COLUMNS`."""
    a, g = layer.inputs, layer.outgrads
    error = "–"
    if layer.kronecker_error is not None:
        error = f"{layer.kronecker_error:.2f}±{layer.kronecker_error_se:.2f}"
    return [
        layer.name + ("" if layer.trained else " *"),
        f"{layer.numel:,}",
        number(None if a is None else a.condition, 1),
        "–" if a is None else f"{number(a.effective_rank, 2)}/{a.size}",
        number(None if g is None else g.condition, 1),
        "–" if g is None else f"{number(g.effective_rank, 2)}/{g.size}",
        number(layer.gradient_top_share, 2),
        error,
        number(layer.alignment, 2),
        number(layer.noise_scale, 2),
        number(100 * layer.curvature_share, 2),
        number(layer.reach, 2),
        "–" if layer.out_of_reach is None else f"{100 * layer.out_of_reach:.0f}",
    ]


STEP_COLUMNS = (
    ("optimizer", "A member of lw.optim"),
    ("best rate", "The rate at which the quadratic model predicts the largest decrease"),
    ("predicted", "Decrease of the loss there, by the quadratic model"),
    ("measured", "Decrease of the loss there"),
    ("‖Δθ‖/‖θ‖", "Size of that step"),
)


def step_row(step: Step) -> list[str]:
    """A step as the cells of `STEP_COLUMNS`."""
    return [
        step.name,
        number(step.rate, 2),
        number(step.predicted, 2),
        number(step.measured, 2),
        number(step.size, 2),
    ]


def shown_layers(report: Report) -> tuple[list[Layer], int]:
    """The layers of a table in the model's order, those with most curvature and reach; and how many are left out."""
    layers = list(report.measured.layers)
    if len(layers) <= SHOWN:
        return layers, 0
    total = sum(layer.reach for layer in layers) or 1.0
    best = sorted(layers, key=lambda layer: -(layer.curvature_share + layer.reach / total))[:SHOWN]
    kept = {layer.name for layer in best}
    return [layer for layer in layers if layer.name in kept], len(layers) - SHOWN


# --- terminal ---------------------------------------------------------------------------------------------------------


def _rich(report: Report) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size((120, 24)).columns if terminal else 150
    console = Console(file=io.StringIO(), width=max(width, 60), force_terminal=terminal, highlight=False)
    console.print(Text(heading(report), style="bold"))
    console.print()
    if not report.findings:
        console.print("Nothing was found that holds training back.")
    for place, finding in enumerate(report.findings, start=1):
        line = Text(f"{place}. ")
        line.append(f"[{finding.severity}] ", STYLES[finding.severity])
        line.append(finding.statement, "bold" if finding.severity == "severe" else "")
        line.append(f" {finding.evidence}")
        line.append(f" → {finding.remedy}", "green")
        line.append(f" (predicted gain: {number(finding.gain, 2)} of the loss)", "dim")
        console.print(line)
    layers, left_out = shown_layers(report)

    def table(title: str, columns: Any, rows: list[list[str]]) -> None:
        drawn = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
        for place, (name, _) in enumerate(columns):
            drawn.add_column(name, justify="left" if place == 0 else "right", overflow="fold", no_wrap=place > 0)
        for row in rows:
            drawn.add_row(*(Text(cell) for cell in row))
        console.print(drawn)

    if layers:
        table("Layers", LAYER_COLUMNS, [layer_row(layer) for layer in layers])
        console.print(Text(LEGEND, style="dim"))
    if left_out:
        console.print(f"{left_out} more layers: report.save_html(path) and report.to_json() have all.")
    if report.measured.steps:
        table("Steps", STEP_COLUMNS, [step_row(step) for step in report.measured.steps])
    for note in report.measured.notes:
        console.print(Text(f"note: {note}", style="dim"))
    console.print(Text(f"{report.took:.1f} s of {report.seconds:g} s", style="dim"))
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


def _plain(report: Report) -> str:
    lines = [heading(report), ""]
    for place, finding in enumerate(report.findings, start=1):
        lines += textwrap.wrap(f"{place}. {finding}", 100, subsequent_indent="   ")
    if not report.findings:
        lines.append("Nothing was found that holds training back.")
    layers, left_out = shown_layers(report)
    if layers:
        lines += ["", "Layers", *_aligned(LAYER_COLUMNS, [layer_row(layer) for layer in layers])]
        lines += textwrap.wrap(LEGEND, 100)
    if left_out:
        lines.append(f"{left_out} more layers: report.save_html(path) and report.to_json() have all.")
    if report.measured.steps:
        lines += ["", "Steps", *_aligned(STEP_COLUMNS, [step_row(step) for step in report.measured.steps])]
    lines += [f"note: {note}" for note in report.measured.notes]
    return "\n".join([*lines, f"{report.took:.1f} s of {report.seconds:g} s"])


def _aligned(columns: Any, rows: list[list[str]]) -> list[str]:
    table = [[name for name, _ in columns], *rows]
    widths = [max(len(row[place]) for row in table) for place in range(len(columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
