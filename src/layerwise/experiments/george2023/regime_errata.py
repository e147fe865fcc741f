"""Where chapters 5 and 6 of George (2023) err: both readings, against a computation that needs neither."""

from layerwise.experiments import errata
from layerwise.experiments.errata import Place
from layerwise.experiments.george2023 import PAPER

PLACES = {
    "linearized-flow": Place(
        "(5.4.6)", "The linearized flow has the rate μθ⁰", "The linearized flow has the rate 2μθ⁰", "linearized_flow"
    ),
    "linearized-model": Place(
        "Section 5.4.1",
        "The linearized model is Σ w w⁰ v",
        "The linearized model is Σ (w w⁰ − ½(w⁰)²) v",
        "linearized_parameters",
    ),
    "time": Place(
        "(5.4.7), left",
        "The time to ε of the non-linear flow is log(θ*/εθ⁰)/ỹ",
        "The time to ε of the non-linear flow is log(θ*²/εθ⁰)/2ỹ",
        "times",
        0.02,
    ),
    "linearized-time": Place(
        "(5.4.7), right",
        "The time to ε of the linearized flow is log(θ*/ε)/μθ⁰",
        "The time to ε of the linearized flow is log(θ*/ε)/2μθ⁰",
        "linearized_times",
        0.02,
    ),
    "ratio": Place(
        "Section 5.4.3",
        "Up to logarithms, times have the ratio t_k/t_l = ỹ_k/ỹ_l",
        "Up to logarithms, times have the ratio t_k/t_l = ỹ_l/ỹ_k",
        "ratio_of_times",
        0.25,
    ),
    "sequence": Place(
        "(5.4.8)",
        "Other modes have exponents 2r and 2r − 1 of ε and σ",
        "Other modes have exponents r and r − 1 of ε and σ",
        "when_converged",
        0.02,
    ),
    "basis": Place(
        "Example 2 of chapter 5",
        "The non-linear flow learns the clean labels first, whatever η is (by how much it learns flipped ones before)",
        "It does if √(n + η²)(n − 2q)/√n > 2η√(q(n − q)/n) (by how much it learns flipped ones before)",
        "learned_first",
        0.0,
        "The model is tied to a basis of an eigenspace of n − 1 dimensions, which is arbitrary: with the η = 5 of the "
        "authors' code one that holds the labels' residual learns the noise first.",
    ),
    "spurious": Place(
        "Example 3 of chapter 5",
        "The spurious feature is e_2 (share of the minority where it is not)",
        "The spurious feature is e_1 (share of the minority where it is not)",
        "spurious_coordinate",
    ),
    "step": Place("After (B.1.28)", "vᵀδw = √λ uᵀ∇L", "vᵀδw = −η√λ uᵀ∇L", "step_along_modes"),
    "time-constant": Place(
        "Appendix B.1.5.2",
        "Modes decay with τ = −log(1 − λ_j/λ_1)",
        "Modes decay with τ = −1/log(1 − λ_j/λ_1)",
        "time_constant",
    ),
    "singular-values": Place(
        "Appendix B.1.5.2",
        "The features are Σ λ u vᵀ, with eigenvalues λ of the kernel",
        "The features are Σ √λ u vᵀ, with eigenvalues λ of the kernel",
        "singular_values",
    ),
    "centering": Place(
        "(6.3.3)",
        "Features are centred by I − 11ᵀ/nc",
        "Features are centred output by output, by (I − 11ᵀ/n) ⊗ I",
        "centering",
        note="Section 6.3.1 subtracts the mean over inputs, which is another operation for more than one output.",
    ),
    "top-eigenvalues": Place(
        "(6.3.2)",
        "The share of the top k eigenvalues sums over j < k",
        "The share of the top k eigenvalues sums over j ≤ k",
        "top_eigenvalues",
        note="Unless eigenvalues are counted from zero, which they are not elsewhere.",
    ),
    "indicator": Place("Before (B.2.23)", "δ = (ε + ½)/2 for ε = 2δ − 1", "δ = (ε + 1)/2 for ε = 2δ − 1", "indicator"),
    "classes": Place(
        "(B.2.22)",
        "The supremum of a sum over classes is the sum of suprema (relative difference)",
        "The supremum of a sum over classes is at most the sum of suprema (by how much it exceeds it)",
        "classes_apart",
    ),
    "square": Place(
        "(B.2.37)",
        "‖A⁻¹Φᵀ‖_F is the trace of the kernel",
        "‖A⁻¹Φᵀ‖²_F is the trace of the kernel",
        "square_of_the_norm",
    ),
    "kappa": Place(
        "(6.4.10)",
        "With the trace of the kernel kept in every step, SuperNat ends below half of gradient descent's error (ratio)",
        "With κ of the first step, kept, SuperNat ends below half of gradient descent's error (ratio)",
        "kappa",
        0.5,
        "The thesis has the rule up to isotropic rescaling, and that matters: if the trace is kept, slow modes are "
        "stretched again in the end, and all noise is learned.",
    ),
}
ELSEWHERE = (
    "Not here: the bound (2.5.4), whose last term is smaller than that of (B.2.5); we have no instance that refutes "
    "it, and the library does not have it. Eigenvalues of figure 1 of chapter 6 are in disk-eigenfunctions."
)

EXPERIMENT = errata.experiment(
    PLACES,
    errata.numbered("layerwise.studies.training_regimes.errata"),
    name="regime-errata",
    title="Where chapters 5 and 6 of the thesis err, and what holds instead",
    paper=PAPER,
    figure="Section 5.4, (6.3.2), (6.3.3), (6.4.10), appendices B.1.5 and B.2",
    elsewhere=ELSEWHERE,
)
