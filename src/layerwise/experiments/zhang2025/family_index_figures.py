"""Figures of the experiment family-index: one step of every member, by anisotropy and by damping."""

from collections.abc import Sequence

from layerwise.experiments.against_theory import means
from layerwise.experiments.experiment import Record
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.over_seeds import band, bars
from layerwise.studies.feature_learning.index_members import INDEX_MEMBERS

BY_E, BY_DAMPING = "anisotropies", "dampings"
LABEL = {name: member.label for name, member in INDEX_MEMBERS.items()}
TWINS = ("locoprop", "ekfac", "adam", "ekfac-relative")
"""Those whose curves lie on those of FOOF, KFAC and Sign."""
DAMPED = tuple(name for name, member in INDEX_MEMBERS.items() if member.damped and name not in ("locoprop", "ekfac"))


def first_steps(records: Sequence[Record], *, e: float, damping: float, dx: int) -> Figure:
    """Correlation by anisotropy with theory, and shares at one anisotropy as bars."""
    shown = [name for name in INDEX_MEMBERS if name not in TWINS]
    predicted = [
        band(records, BY_E, "point", f"{name}/theory", f"{LABEL[name]}, predicted", style="dashed")
        for name in ("sgd", "foof", "sign")
    ]
    shares = bars(records, BY_E, {f"{name}@{e:g}/share": label for name, label in LABEL.items()})
    return Figure(
        name="family-index",
        title=f"One step of every member, λ = {damping:g}",
        caption=(
            "Dashed: Lemmas 3.10 (SGD) and 3.12 (FOOF), and SGD's times what signs lose. The singular values of Muon, "
            "Shampoo and SOAP are (nearly) equal, so that their top vectors are accidents; the share (at e = "
            f"{e:g}) is not. An equal share is {dx**-0.5:.2f}. LocoProp lies on FOOF, EKFAC on KFAC, Adam on Sign."
        ),
        panels=[
            Panel(
                title="top right singular vector of the change",
                x_label="anisotropy e",
                y_label="correlation with β⋆",
                curves=_points(records, BY_E, "correlation", shown) + predicted,
            ),
            Panel(title="share of β⋆ in the change", x_label="", y_label="share", curves=shares),
        ],
    )


def by_damping(records: Sequence[Record], *, e: float) -> Figure:
    """Both measures of the members that have a damping."""
    return Figure(
        name="family-index-dampings",
        title=f"By damping, at e = {e:g}",
        caption="λ absolute (FOOF, KFAC) or relative to the mean eigenvalue of each factor, or of NGD's matrix.",
        panels=[
            Panel(
                title=measure,
                x_label="λ",
                y_label=measure,
                x_scale="log",
                curves=_points(records, BY_DAMPING, measure, ("sgd", *DAMPED)),
            )
            for measure in ("correlation", "share")
        ],
    )


def _points(records: Sequence[Record], cell: str, measure: str, names: Sequence[str]) -> list[Curve]:
    return [means(records, cell, "point", f"{name}/{measure}", LABEL[name]) for name in names]
