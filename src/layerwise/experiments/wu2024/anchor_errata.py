"""Where chapter 3 of Wu (2023) errs: both readings on random instances."""

from layerwise.experiments import errata
from layerwise.experiments.errata import Place
from layerwise.experiments.wu2024 import PAPER

EXACT = 1e-9
PLACES = {
    "hidden-word": Place(
        "(B.8), (B.9)",
        "KL(p*‖p) < s p⁻ log(1/(1 − p⁻)) (largest excess over it)",
        "KL(p*‖p) = s p⁻ + log(1 − p⁻ (1 − e^(−s))) (largest relative difference)",
        "hidden_word",
        EXACT,
        "The theorem stands, with the constant 1 in place of 2, and without p⁻ ≤ 1/2.",
    ),
    "distance": Place(
        "(3.36), (3.37)",
        "The total variation is at least the change of the bulk plus that of the words of interest (shortfall)",
        "Σ|p* − p| is at least their sum, and half of it at least the larger of them (shortfall)",
        "two_distances",
        EXACT,
        "The proof of Theorem 3.5.7 only uses the larger, so its 288 is right.",
    ),
    "cases": Place(
        "Before (3.20)",
        "ε_p ≤ Λ/3 gives 1 − e^(−ε_p) ≥ 1 − e^(−Λ/3), and ε_p > Λ/3 the other bound (shortfall)",
        "ε_p ≥ Λ/3 gives 1 − e^(−ε_p) ≥ 1 − e^(−Λ/3), and ε_p ≤ Λ/3 the other bound (shortfall)",
        "two_cases",
        EXACT,
    ),
    "sinh": Place(
        "Before (3.20)",
        "e^(−Λ/3) (e^(2Λ/3) − 1) = sinh(Λ/3)",
        "e^(−Λ/3) (e^(2Λ/3) − 1) = 2 sinh(Λ/3)",
        "hyperbolic_sine",
        EXACT,
        "(3.21) has the 2 again.",
    ),
    "condition": Place(
        "Remark 3.5.8",
        "4 ε_b < Γ < 3 is enough for KL ≥ p_b² Γ²/288 to follow (shortfall)",
        "8 ε_b < Γ < 6, as the theorem has it, is enough for KL ≥ p_b² Γ²/288 to follow (shortfall)",
        "condition",
        EXACT,
        "Assumption 3.5.5 has the 4 as well.",
    ),
    "task": Place(
        "Assumption 3.5.1",
        "The task, of plain logits, is the same when logits of contexts are shifted (relative change)",
        "The task of (3.7), of anchored logits, is the same when logits of contexts are shifted (relative change)",
        "task",
        EXACT,
    ),
    "cross-entropy": Place(
        "Section 3.2",
        "The pre-training loss is E[−p* log p] (relative difference from KL + entropy)",
        "The pre-training loss is E[−log p] (relative difference from KL + entropy)",
        "cross_entropy",
        EXACT,
    ),
}
ELSEWHERE = (
    "Not here: the width of OPT-350M's states, 512 where Table B.1 has 1024, and which part of WikiText-2 was used, "
    "which the thesis does not say."
)

EXPERIMENT = errata.experiment(
    PLACES,
    errata.numbered("layerwise.studies.anchor_vectors.errata"),
    name="anchor-errata",
    title="Where the thesis's chapter on language models errs, and what holds instead",
    paper=PAPER,
    figure="Chapter 3 and appendix B",
    elsewhere=ELSEWHERE,
)
