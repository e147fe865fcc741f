"""What the experiment on real data claims, part by part."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerwise.experiments.claims import Claim, by_seed
from layerwise.experiments.over_seeds import bound, combined

SUMMARY = (
    "Two-layer networks on real images, whose pixels are centred and divided by one number, so that their anisotropy "
    "stays. First the labels are a teacher's, F⋆ tanh(G⋆x) + ε, and the features are read off the mean outer product "
    "of the network's gradients. SGD misses them. Adam finds them, against the linear theory: much of the unevenness "
    "lies along single pixels, and rotated pixels take Adam away from the features while SOAP, which finds its own "
    "axes, stays near. KFAC's and EKFAC's distances depend on the teacher, although EKFAC's held-out loss is mostly "
    "below Adam's. Second, real labels: a network learns 0–4, and a ridge head on its hidden layer learns 5–9 from few "
    "examples. All learn the source. SGD's hidden weights move along the eigenvectors of large eigenvalues, KFAC's and "
    "FOOF's along those of small ones, and none of these serves the other labels better than an untrained layer does; "
    "SOAP's and Muon's serve best, and pixels better than all. (The layer has fewer units than there are pixels, so "
    "the untrained layer is the fairer measure.) Rates are chosen by the least distance with known features, by the "
    "held-out source loss with labels, never by the target."
)
SOURCE = "beyond the paper"
CHOSEN = "(Threshold set after seeds 0–2 of digits.)"
AFTER_ALL = "(Declared after seeds 0–4 of digits: none was kept to test it.)"
EXPECTED_BY_THEORY = (
    "Expected from the linear theory, where Adam does not find the features and the inverse of the covariance does. "
    "True on two of five seeds of digits, barely, and on two of three of MNIST (FOOF ran on one). Much unevenness "
    "lies along single pixels, which Adam's scaling of single weights repairs; rotated pixels take that from it."
)
TEACHERS = "First declared for every seed, after seeds 0–2; of seeds 3 and 4, not used for that, it failed on seed 4."
NOT_SEEN = (
    "Expected if features that are found in all directions served other labels. With real labels the inverse of the "
    "covariance sends most of the movement into directions of little variance; more damping gives some of it back."
)


def _common(seeds: int) -> dict[str, Any]:
    return {"seeds": seeds, "source": SOURCE}


def ratio_between(first: tuple[str, str], second: tuple[str, str]) -> Callable[[Sequence[Mapping]], dict[int, float]]:
    """A claim's quantity: a value of one cell over a value of another.

    >>> records = [{"cell": "a", "seed": 0, "values": {"p": 1.0}}, {"cell": "b", "seed": 0, "values": {"q": 4.0}}]
    >>> ratio_between(("a", "p"), ("b", "q"))(records)
    {0: 0.25}
    """

    def quantity(records: Sequence[Mapping]) -> dict[int, float]:
        above, below = by_seed(records, *first), by_seed(records, *second)
        return {seed: above[seed] / below[seed] for seed in sorted(set(above) & set(below))}

    return quantity


def known_claims(cell: str, seeds: int) -> list[Claim]:
    """Who finds the teacher's features from pixels."""
    common = _common(seeds)
    return [
        bound(cell, "sgd/dist", ">=", 0.35, f"SGD misses the features at each of its rates. {CHOSEN}", **common),
        bound(cell, "adam/dist", "<=", 0.25, f"Adam finds the features. {CHOSEN}", **common),
        Claim(
            name=f"{cell}/soap-before-sgd",
            statement=f"SOAP is nearer to the features than SGD. {AFTER_ALL}",
            quantity=combined(cell, ["soap/dist", "sgd/dist"], lambda soap, sgd: soap / sgd),
            relation="<",
            target=1.0,
            **common,
        ),
        Claim(
            name=f"{cell}/inverse-before-adam",
            statement="The nearest of FOOF, KFAC and EKFAC, which invert the inputs' covariance, is nearer than Adam.",
            quantity=combined(
                cell, [f"{name}/dist" for name in ("adam", "foof", "kfac", "ekfac")], lambda adam, *o: min(o) / adam
            ),
            relation="<",
            target=1.0,
            expected="refuted",
            erratum=EXPECTED_BY_THEORY,
            **common,
        ),
        Claim(
            name=f"{cell}/ekfac-has-less-loss",
            statement="EKFAC's least held-out loss is below Adam's all the same, for most teachers.",
            quantity=combined(cell, ["ekfac/least_loss", "adam/least_loss"], lambda ekfac, adam: ekfac / adam),
            relation="<",
            target=1.0,
            test="share",
            share=0.6,
            erratum=TEACHERS,
            **common,
        ),
    ]


def rotated_claims(rotated: str, known: str, seeds: int) -> list[Claim]:
    """What the basis of pixels is worth."""
    common = _common(seeds)
    return [
        Claim(
            name=f"{rotated}/adam-needs-pixels",
            statement=f"Rotated pixels take Adam farther from the features. {CHOSEN}",
            quantity=ratio_between((rotated, "adam/dist"), (known, "adam/dist")),
            relation=">=",
            target=1.4,
            **common,
        ),
        Claim(
            name=f"{rotated}/soap-before-adam",
            statement=f"On rotated pixels SOAP, which finds its own axes, is nearer than Adam. {CHOSEN}",
            quantity=combined(rotated, ["soap/dist", "adam/dist"], lambda soap, adam: soap / adam),
            relation="<=",
            target=0.85,
            **common,
        ),
    ]


def movement_claims(cell: str, seeds: int) -> list[Claim]:
    """Along which eigen-directions real labels move the hidden weights."""
    common = _common(seeds)
    top, bottom = "the third of the directions with the largest eigenvalues", "the third with the smallest"
    return [
        bound(cell, "sgd/top", ">=", 0.8, f"SGD moves the hidden weights along {top}. {CHOSEN}", **common),
        bound(cell, "kfac/bottom", ">=", 0.45, f"KFAC moves them mostly along {bottom}. {CHOSEN}", **common),
        bound(cell, "foof/bottom", ">=", 0.6, f"FOOF moves them mostly along {bottom}. {CHOSEN}", **common),
    ]


def label_claims(cell: str, members: Sequence[str], each: int, least: float, seeds: int) -> list[Claim]:
    """Whose hidden layer serves other labels, with `each` examples of every target label."""
    common, at = _common(seeds), f"target@{each}"
    return [
        Claim(
            name=f"{cell}/source",
            statement=f"Every member learns the labels that it is trained on. {CHOSEN}",
            quantity=combined(cell, [f"{name}/source" for name in members], lambda *found: min(found)),
            relation=">=",
            target=least,
            **common,
        ),
        Claim(
            name=f"{cell}/pixels-before-all",
            statement=f"No member's hidden layer, which has fewer units than there are pixels, serves the other labels "
            f"as well as pixels do ({each} examples each): the best accuracy less that of pixels.",
            quantity=combined(
                cell, [f"pixels/{at}", *(f"{name}/{at}" for name in members)], lambda pixels, *o: max(o) - pixels
            ),
            relation="<",
            target=0.0,
            **common,
        ),
        Claim(
            name=f"{cell}/kfac-before-untrained",
            statement=f"KFAC's hidden layer serves the other labels better than an untrained one ({each} examples "
            "each): the gain in accuracy.",
            quantity=combined(cell, [f"kfac/{at}", f"random/{at}"], lambda kfac, random: kfac - random),
            relation=">",
            target=0.0,
            expected="refuted",
            erratum=NOT_SEEN,
            **common,
        ),
        Claim(
            name=f"{cell}/muon-before-kfac",
            statement=f"Muon's hidden layer serves the other labels better than KFAC's ({each} examples each).",
            quantity=combined(cell, [f"muon/{at}", f"kfac/{at}"], lambda muon, kfac: muon - kfac),
            relation=">",
            target=0.0,
            **common,
        ),
        Claim(
            name=f"{cell}/damping-helps",
            statement="More damping makes KFAC's hidden layer serve the other labels better "
            f"({each} examples each). {AFTER_ALL}",
            quantity=combined(cell, [f"kfac-damped/{at}", f"kfac/{at}"], lambda damped, kfac: damped - kfac),
            relation=">",
            target=0.0,
            **common,
        ),
    ]
