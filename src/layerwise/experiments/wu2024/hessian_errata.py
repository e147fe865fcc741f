"""Where chapter 4 and appendix C of Wu (2023) err: both readings, against a computation that needs neither."""

from layerwise.experiments import errata
from layerwise.experiments.errata import Place
from layerwise.experiments.wu2024 import PAPER

PLACES = {
    "kronecker": Place(
        "Section 4.2",
        "M ⊗ N has the entries M[i₁, i₂] N[j₁, j₂]",
        "M ⊗ N has the entries M[i₁, j₁] N[i₂, j₂]",
        "kronecker",
    ),
    "matricization": Place(
        "Definition 4.2.2", "Mat(h)[i, j] is h[(i − 1)m + j]", "Mat(h)[i, j] is h[(i − 1)n + j]", "matricization"
    ),
    "mask": Place(
        "Section 4.4 and (C.30)",
        "D has ones where the output of the unit is ≥ 0 (which is everywhere)",
        "D has ones where the input of the unit is > 0",
        "mask",
    ),
    "mean": Place(
        "(C.2)",
        "The Hessian of the training loss is the sum of those of the examples",
        "The Hessian of the training loss is the mean of those of the examples",
        "mean_loss",
    ),
    "sum-of-weights": Place(
        "Lemma C.2.1",
        "A sum of n weights of variance 1/n has variance 1/n",
        "A sum of n weights of variance 1/n has variance 1",
        "sum_of_weights",
        0.05,
        "What rests on it is in initialisation-theorem.",
    ),
    "products": Place(
        "Before (C.261)",
        "Unrelated unit vectors of m entries have a product of √(1/m) in the mean (of its size)",
        "Unrelated unit vectors of m entries have a squared product of 1/m in the mean",
        "products_of_vectors",
        0.08,
        "The result, k/m, is right.",
    ),
    "overlap": Place(
        "(C.261)",
        "The overlap of two spaces of k dimensions is the sum of the k squared products of their bases",
        "The overlap of two spaces of k dimensions is the sum of all k² squared products, divided by k",
        "overlap_as_a_sum",
        note="In the mean over random bases both are k/m.",
    ),
    "clusters": Place(
        "(C.264)",
        "E[M] is the mean of ΓᵀΓ over classes and logits",
        "E[M] is the mean of ΓᵀΓ over classes of its sum over logits",
        "clusters",
        note="On one example a class; with several, both leave out the variance within classes.",
    ),
    "default-start": Place(
        "Section C.5",
        "PyTorch draws weights of linear layers with Xavier's deviation",
        "PyTorch draws weights of linear layers evenly within ± fan-in^-½",
        "default_start",
        0.03,
        "Biases, too: they are not zero. Networks here are drawn by Xavier's rule, with biases of zero, by hand.",
    ),
    "rescaling": Place(
        "Section C.2.3",
        "H/d² has a norm that neither vanishes nor grows with d (relative change for 16 times as many inputs)",
        "H/d has a norm that neither vanishes nor grows with d (relative change for 16 times as many inputs)",
        "rescaling",
        0.05,
        "The thesis has both.",
    ),
}
ELSEWHERE = (
    "The closed form of theorem 4.4.1 is in initialisation-theorem; (C.257), which is true but never sharp, in "
    "input-moments. Not here: (C.18), whose last block is of x⁽ᴸ⁾, not x⁽ⁿ⁾."
)

EXPERIMENT = errata.experiment(
    PLACES,
    errata.numbered("layerwise.studies.hessian_structure.errata"),
    name="hessian-errata",
    title="Where the thesis errs about Hessians, and what holds instead",
    paper=PAPER,
    figure="Chapter 4 and appendix C",
    elsewhere=ELSEWHERE,
)
