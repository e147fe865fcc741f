"""Panels of the experiment on real data: distance by member, accuracy by examples, movement by eigen-direction."""

from collections.abc import Mapping, Sequence

from layerwise.experiments.experiment import Record
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.over_seeds import band, bars


def by_examples(
    records: Sequence[Record], cell: str, labels: Mapping[str, str], each: Sequence[int], dashed: Sequence[str]
) -> list[Curve]:
    """Accuracy on the target against the number of examples a class."""
    found = []
    for name, label in labels.items():
        keys = [f"{name}/target@{n}" for n in each]
        part = [
            {**r, "series": {"each": list(each), "accuracy": [r["values"][key] for key in keys]}}
            for r in records
            if all(key in r["values"] for key in keys)
        ]
        found.append(band(part, cell, "each", "accuracy", label, "dashed" if name in dashed else "line"))
    return [curve for curve in found if len(curve.x)]


def _has(records: Sequence[Record], cell: str, key: str) -> bool:
    return any(record["cell"] == cell and key in record["values"] for record in records)


def known_figure(records: Sequence[Record], cells: Mapping[str, str], labels: Mapping[str, str]) -> Figure:
    """Distances and held-out losses; `cells` from a cell to its title."""
    panels = []
    for cell, title in cells.items():
        for measure, what in (("dist", "distance to the features"), ("loss", "held-out loss")):
            names = {f"{name}/{measure}": label for name, label in labels.items()}
            curves = bars(records, cell, {key: label for key, label in names.items() if _has(records, cell, key)})
            panels.append(Panel(title=title, x_label="", y_label=what, y_scale="log", curves=curves))
    return Figure(
        name="real-data-known",
        title="Features of a teacher, inputs that are images",
        caption="Each member at the rate of its least distance. Median over seeds; the line spans all seeds. Between "
        "Adam and those that invert the inputs' covariance (FOOF, KFAC, EKFAC) the order changes with the teacher.",
        panels=panels,
    )


def transfer_figure(
    records: Sequence[Record],
    cells: Mapping[str, str],
    labels: Mapping[str, str],
    each: Sequence[int],
    baselines: Mapping[str, str],
) -> Figure:
    """Accuracy on the other labels by the number of examples."""
    return Figure(
        name="real-data-transfer",
        title="A hidden layer trained on the labels 0–4 serves the labels 5–9",
        caption="Test accuracy of a ridge head; each member at its rate of the least held-out loss on 0–4. Dashed: no "
        "training on 0–4. Median over seeds; the band spans all seeds.",
        panels=[
            Panel(
                title=title,
                x_label="examples of each target label",
                y_label="accuracy on 5–9",
                x_scale="log",
                curves=by_examples(records, cell, {**labels, **baselines}, each, list(baselines)),
            )
            for cell, title in cells.items()
        ],
    )


def movement_figure(records: Sequence[Record], cells: Mapping[str, str], labels: Mapping[str, str]) -> Figure:
    """Where the hidden weights moved, by eigen-direction of the inputs' covariance."""
    return Figure(
        name="real-data-movement",
        title="Along which eigen-directions the hidden weights move",
        caption="‖ΔG v_j‖² as a part of the sum, eigenvalues from the largest to the smallest; median over seeds.",
        panels=[
            Panel(
                title=title,
                x_label="eigen-direction",
                y_label="part of the movement",
                y_scale="log",
                curves=[
                    curve
                    for name, label in labels.items()
                    if len((curve := band(records, cell, "direction", f"{name}/movement", label)).x)
                ],
            )
            for cell, title in cells.items()
        ],
    )
