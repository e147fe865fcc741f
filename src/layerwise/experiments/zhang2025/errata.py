"""Where Zhang et al. (2025) err or can be read in two ways: both readings, against a computation that needs neither."""

from layerwise.experiments import errata
from layerwise.experiments.errata import Place
from layerwise.experiments.zhang2025 import PAPER

SCANNED = "The scanned text that we have may be damaged here; then the error is not the authors'."
PLACES = {
    "norm": Place(
        where="Proposition D.2",
        printed="Steepest descent in ‖PᵀMQᵀ‖_F is −ηP⁻¹gQ⁻¹",
        corrected="Steepest descent in ‖P^½MQ^½‖_F is −ηP⁻¹gQ⁻¹",
        tolerance=1e-8,
        readings="norm_of_the_step",
    ),
    "foof": Place(
        where="Appendix D.1, FOOF",
        printed="The objective with (λ/2)‖D‖² has the minimiser η∇(S + λI)⁻¹",
        corrected="The objective with (λ/2)‖D‖² has the minimiser η∇(S + (λ/2)I)⁻¹",
        tolerance=1e-8,
        readings="foof_ridge",
    ),
    "locoprop": Place(
        where="Appendix D.1, LocoProp",
        printed="With target h the minimiser is the step −η∇(I + ηS)⁻¹",
        corrected="With target h − ∂ℓ/∂h the minimiser is the step −η∇(I + ηS)⁻¹",
        tolerance=1e-8,
        readings="locoprop_target",
        doubt=SCANNED,
    ),
    "fisher": Place(
        where="Appendix D.1, KFAC",
        printed="The Fisher information is E[s²] with s = ∂p/∂f",
        corrected="The Fisher information is E[s²] with s = ∂log p/∂f",
        tolerance=1e-6,
        readings="fisher_of_the_density",
    ),
    "derivative": Place(
        where="Lemma 3.12",
        printed="m′(−λ) is −lim tr(Sx + λI)⁻²/dx",
        corrected="m′(−λ) is +lim tr(Sx + λI)⁻²/dx",
        tolerance=0.03,
        readings="sign_of_the_derivative",
    ),
    "ratio": Place(
        where="Proof of Lemma 3.12",
        printed="KFAC's correlation tends to one as dx/n → ∞",
        corrected="KFAC's correlation tends to one as dx/n → 0",
        tolerance=0.03,
        readings="limit_of_the_ratio",
        doubt=SCANNED,
    ),
    "whitening": Place(
        where="Appendix F.2.1",
        printed="On whitened inputs the representation is rowsp(G⋆Σ)",
        corrected="On whitened inputs the representation is rowsp(G⋆Σ^½)",
        tolerance=1e-6,
        readings="whitened_limit",
    ),
    "low-anisotropy": Place(
        where="Appendix F.1",
        printed="(E + Eᵀ)/2 with E = 5I + N is positive definite (share of negative eigenvalues)",
        corrected="(E + Eᵀ)/2 with E = 5I + N/√dx is positive definite (share of negative eigenvalues)",
        tolerance=0.0,
        readings="low_anisotropy",
    ),
    "noise": Place(
        where="Eq. (16)",
        printed="The noise of a step does not depend on η (growth of what it leaves, from η = 0.1 to 0.5)",
        corrected="The noise of a step is proportional to η (growth of what it leaves, from η = 0.1 to 0.5)",
        tolerance=0.25,
        readings="noise_of_a_step",
    ),
    "transfer": Place(
        where="Lemma 3.7",
        printed="The squared error on the target task stays below twice the bound (by how much it exceeds it)",
        corrected="The squared error without the labels' noise stays below twice the bound (by how much it exceeds it)",
        tolerance=0.0,
        readings="transfer_error",
    ),
    "orthogonal": Place(
        where="Proof of Lemma B.5",
        printed="G⋆Gᵀ is an orthogonal matrix, so that s_min(G⋆Gᵀ) = 1",
        corrected="s_min(G⋆Gᵀ) = √(1 − dist²)",
        tolerance=1e-6,
        readings="orthogonal_product",
    ),
    "self-normalised": Place(
        where="Lemma B.4",
        printed="‖Σ w vᵀ Σ̂^−½‖² ≤ 8 dv log((1 + c)/(1 − c)) + 26 dw + 16 log 1/δ for σ_w = 1 (by how much it fails)",
        corrected="‖Σ w vᵀ Σ̂^−½‖² ≤ 8 dv log(2/(1 − c)) + 26 dw + 16 log 1/δ for σ_w = 1 (by how much it fails)",
        tolerance=0.0,
        readings="self_normalised",
        doubt=SCANNED,
    ),
    "concentration": Place(
        where="Lemma E.2",
        printed="(1 − c)Σ ⪯ Sx follows from ‖Sx − Σ‖ ≤ c‖Σ‖ (by how much it fails)",
        corrected="(1 − c)Σ ⪯ Sx holds with the c of isotropic samples, 2√(dx/n) + dx/n (by how much it fails)",
        tolerance=1e-9,
        readings="concentration",
    ),
}
ELSEWHERE = (
    "Others are shown where they matter: the noise as deviation or variance and the scale of Σ (head-to-head), "
    "the repair of the low-anisotropy covariance (four-settings), the reversed inequality in the proof of Proposition "
    "3.5 (lower-bound). Where the scanned text may be damaged the claim says so: the target of LocoProp, the limit "
    "dx/n → ∞, the logarithm of Lemma B.4."
)

EXPERIMENT = errata.experiment(
    PLACES,
    errata.numbered("layerwise.studies.feature_learning.errata"),
    name="errata",
    title="Where the paper errs, and what holds instead",
    paper=PAPER,
    figure="Proposition D.2, Lemmas 3.7, 3.12, B.4, B.5 and E.2, eq. (16), Appendices D and F",
    elsewhere=ELSEWHERE,
)
