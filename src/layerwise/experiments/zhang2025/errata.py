"""Where Zhang et al. (2025) err or can be read in two ways: both readings, against a computation that needs neither."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.over_seeds import bound, distinct
from layerwise.experiments.zhang2025 import PAPER
from layerwise.studies.feature_learning import errata
from layerwise.studies.feature_learning.errata import Erratum

CELL = "places"
LEAST = 1e-16
"""What stands for zero on a logarithmic axis."""
SCANNED = "The scanned text that we have may be damaged here; then the error is not the authors'."
ERRATA: dict[str, Erratum] = {
    "norm": Erratum(
        place="Proposition D.2",
        printed="Steepest descent in ‖PᵀMQᵀ‖_F is −ηP⁻¹gQ⁻¹",
        corrected="Steepest descent in ‖P^½MQ^½‖_F is −ηP⁻¹gQ⁻¹",
        tolerance=1e-8,
        readings=errata.norm_of_the_step,
    ),
    "foof": Erratum(
        place="Appendix D.1, FOOF",
        printed="The objective with (λ/2)‖D‖² has the minimiser η∇(S + λI)⁻¹",
        corrected="The objective with (λ/2)‖D‖² has the minimiser η∇(S + (λ/2)I)⁻¹",
        tolerance=1e-8,
        readings=errata.foof_ridge,
    ),
    "locoprop": Erratum(
        place="Appendix D.1, LocoProp",
        printed="With target h the minimiser is the step −η∇(I + ηS)⁻¹",
        corrected="With target h − ∂ℓ/∂h the minimiser is the step −η∇(I + ηS)⁻¹",
        tolerance=1e-8,
        readings=errata.locoprop_target,
        doubt=SCANNED,
    ),
    "fisher": Erratum(
        place="Appendix D.1, KFAC",
        printed="The Fisher information is E[s²] with s = ∂p/∂f",
        corrected="The Fisher information is E[s²] with s = ∂log p/∂f",
        tolerance=1e-6,
        readings=errata.fisher_of_the_density,
    ),
    "derivative": Erratum(
        place="Lemma 3.12",
        printed="m′(−λ) is −lim tr(Sx + λI)⁻²/dx",
        corrected="m′(−λ) is +lim tr(Sx + λI)⁻²/dx",
        tolerance=0.03,
        readings=errata.sign_of_the_derivative,
    ),
    "ratio": Erratum(
        place="Proof of Lemma 3.12",
        printed="KFAC's correlation tends to one as dx/n → ∞",
        corrected="KFAC's correlation tends to one as dx/n → 0",
        tolerance=0.03,
        readings=errata.limit_of_the_ratio,
        doubt=SCANNED,
    ),
    "whitening": Erratum(
        place="Appendix F.2.1",
        printed="On whitened inputs the representation is rowsp(G⋆Σ)",
        corrected="On whitened inputs the representation is rowsp(G⋆Σ^½)",
        tolerance=1e-6,
        readings=errata.whitened_limit,
    ),
    "low-anisotropy": Erratum(
        place="Appendix F.1",
        printed="(E + Eᵀ)/2 with E = 5I + N is positive definite (share of negative eigenvalues)",
        corrected="(E + Eᵀ)/2 with E = 5I + N/√dx is positive definite (share of negative eigenvalues)",
        tolerance=0.0,
        readings=errata.low_anisotropy,
    ),
    "noise": Erratum(
        place="Eq. (16)",
        printed="The noise of a step does not depend on η (growth of what it leaves, from η = 0.1 to 0.5)",
        corrected="The noise of a step is proportional to η (growth of what it leaves, from η = 0.1 to 0.5)",
        tolerance=0.25,
        readings=errata.noise_of_a_step,
    ),
    "transfer": Erratum(
        place="Lemma 3.7",
        printed="The squared error on the target task stays below twice the bound (by how much it exceeds it)",
        corrected="The squared error without the labels' noise stays below twice the bound (by how much it exceeds it)",
        tolerance=0.0,
        readings=errata.transfer_error,
    ),
    "orthogonal": Erratum(
        place="Proof of Lemma B.5",
        printed="G⋆Gᵀ is an orthogonal matrix, so that s_min(G⋆Gᵀ) = 1",
        corrected="s_min(G⋆Gᵀ) = √(1 − dist²)",
        tolerance=1e-6,
        readings=errata.orthogonal_product,
    ),
    "self-normalised": Erratum(
        place="Lemma B.4",
        printed="‖Σ w vᵀ Σ̂^−½‖² ≤ 8 dv log((1 + c)/(1 − c)) + 26 dw + 16 log 1/δ for σ_w = 1 (by how much it fails)",
        corrected="‖Σ w vᵀ Σ̂^−½‖² ≤ 8 dv log(2/(1 − c)) + 26 dw + 16 log 1/δ for σ_w = 1 (by how much it fails)",
        tolerance=0.0,
        readings=errata.self_normalised,
        doubt=SCANNED,
    ),
    "concentration": Erratum(
        place="Lemma E.2",
        printed="(1 − c)Σ ⪯ Sx follows from ‖Sx − Σ‖ ≤ c‖Σ‖ (by how much it fails)",
        corrected="(1 − c)Σ ⪯ Sx holds with the c of isotropic samples, 2√(dx/n) + dx/n (by how much it fails)",
        tolerance=1e-9,
        readings=errata.concentration,
    ),
}
ELSEWHERE = (
    "Others are shown where they matter: the noise as deviation or variance and the scale of Σ (head-to-head), "
    "the repair of the low-anisotropy covariance (four-settings), the reversed inequality in the proof of Proposition "
    "3.5 (lower-bound). Where the scanned text may be damaged the claim says so: the target of LocoProp, the limit "
    "dx/n → ∞, the logarithm of Lemma B.4."
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Small random instances."""

    seeds: int = 5


def cells(config: Config) -> list[Cell]:
    """One with all places."""
    return [Cell(key=CELL)]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed: the errors of both readings at every place."""
    for seed in seeds:
        values: dict[str, float] = {}
        for place, (name, erratum) in enumerate(ERRATA.items()):
            found = erratum.readings(np.random.default_rng([seed, place]))
            values |= {f"{name}/printed": found.printed, f"{name}/corrected": found.corrected}
        yield Row(seed=seed, values=values)


def claims(config: Config) -> list[Claim]:
    """The printed reading is expected to fail, the corrected one to hold."""
    found = []
    for name, erratum in ERRATA.items():
        common: dict[str, Any] = {
            "seeds": config.seeds,
            "source": erratum.place,
            "span": (0, math.inf),
        }
        wrong = {"origin": "misprint", "expected": "fails", "why": f"{erratum.corrected}.", "note": erratum.doubt}
        for reading, text, more in (("printed", erratum.printed, wrong), ("corrected", erratum.corrected, {})):
            found.append(bound(CELL, f"{name}/{reading}", "<=", erratum.tolerance, f"{text}.", **common, **more))
    return [*found, distinct(CELL, "norm/printed", "Seeds are instances of their own.", seeds=config.seeds)]


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Bars of the errors of both readings."""

    def points(reading: str, label: str) -> Curve:
        columns = [[max(r["values"][f"{name}/{reading}"], LEAST) for r in records] for name in ERRATA]
        lows, highs = ([edge(column, default=LEAST) for column in columns] for edge in (min, max))
        return Curve(label=label, x=list(range(len(ERRATA))), y=highs, low=lows, high=highs, style="points")

    return [
        Figure(
            name="errata",
            title="Two readings",
            caption=f"Relative error, the largest over seeds and its range; zero is drawn at {LEAST:g}.",
            panels=[
                Panel(
                    title="distance from a computation that needs neither",
                    x_label="",
                    y_label="relative error",
                    y_scale="log",
                    curves=[points("printed", "as printed"), points("corrected", "corrected")] if records else [],
                    places=[erratum.place for erratum in ERRATA.values()],
                )
            ],
        )
    ]


EXPERIMENT = Experiment(
    name="errata",
    title="Where the paper errs, and what holds instead",
    paper=PAPER,
    figure="Proposition D.2, Lemmas 3.7, 3.12, B.4, B.5 and E.2, eq. (16), Appendices D and F",
    summary=(
        "Thirteen places where the paper's text is wrong or cannot be meant as it stands. Each is a pair of claims: "
        f"the printed one is known to fail, and the corrected one to hold. {ELSEWHERE}"
    ),
    presets={"smoke": Config(seeds=2), "laptop": Config(), "paper": Config(seeds=20)},
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="seconds",
)
