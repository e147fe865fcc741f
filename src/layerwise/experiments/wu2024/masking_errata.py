"""Where chapter 2 of Wu (2023) errs: both readings, against a computation that needs neither."""

from typing import Any

from layerwise.experiments import errata
from layerwise.experiments.errata import Place
from layerwise.experiments.wu2024 import PAPER

PLACES = {
    "decoded": Place(
        "(2.10)",
        "With codes OMP(y, B, k) the masked loss is a risk and the noise of hidden coordinates",
        "With codes OMP([y]_M, P_M B, k) the masked loss is a risk and the noise of hidden coordinates",
        "what_is_decoded",
        0.03,
        "Relative difference of both sides; codes that see hidden coordinates represent their noise. The corrected one "
        "is a mean over 20,000 samples: some .01 of it is chance.",
    ),
    "levels": Place(
        "Section 2.4.3",
        "The listed levels of noise have equally spaced variances from 1/d² to 1/d",
        "The listed levels of noise are equally spaced standard deviations from 1/d to 1/√d",
        "levels_of_noise",
    ),
    "supports": Place(
        "Assumption 2.3.5",
        "Supports are subsets of [d] (share of atoms that are in none, p = 50, d = 20)",
        "Supports are subsets of [p] (share of atoms that are in none, p = 50, d = 20)",
        "supports_of",
    ),
    "ridge": Place(
        "(A.15)",
        "The support oracle's ridge is 1/σ_z²",
        "The support oracle's ridge is σ²/σ_z²",
        "ridge_of_the_oracle",
        note="At σ = .1, σ_z = 1. The limit σ_z → ∞, which the theorem needs, is the same.",
    ),
    "missed": Place(
        "(A.23)",
        "OMP misses supports at most with a probability that has P(all |z_i| < γ) as a factor",
        "OMP misses supports at most with the sum of both probabilities, kp^−η/√(2 log p) + kγ√(2/π)/σ_z",
        "missed_supports",
        0.0,
        "By how much missed supports exceed the bound, η = 1, with the constants of theorem A.1.1. The text has ≥ in "
        "the factor and evaluates <. The corrected bound still vanishes, as 1/σ_z: see masking-theorem.",
    ),
    "largest": Place(
        "Proof of lemma A.1.2",
        "E exp(t max X) = max E exp(tX)",
        "E exp(t max X) ≤ Σ E exp(tX) (by how much it exceeds it)",
        "largest_square",
        note="The lemma stands: its next line is an upper bound of the right quantity.",
    ),
}
ELSEWHERE = (
    "Not here: (2.8) has z where ‖z‖ is meant; appendix A.1.1 takes ε = σ² for a net of lengths, where squared lengths "
    "are meant, which changes constants; references to algorithms 1 to 3 are lost in the text that we have. That "
    "standard training ends farther from the truth than it started whenever p′ > p is in over-realised."
)


def measure(place: Place, seed: int, number: int) -> Any:
    """Functions of this study take the seed itself, and small matrices are faster on one thread."""
    from layerwise.studies.masked_sparse_coding import errata as study
    from layerwise.studies.masked_sparse_coding.comparison import one_thread

    with one_thread("cpu"):
        return getattr(study, place.readings)(seed)


EXPERIMENT = errata.experiment(
    PLACES,
    measure,
    name="masking-errata",
    title="Where chapter 2 of the thesis errs, and what holds instead",
    paper=PAPER,
    figure="(2.10), section 2.4.3, assumption 2.3.5, (A.15), (A.23), lemma A.1.2",
    elsewhere=ELSEWHERE,
)
