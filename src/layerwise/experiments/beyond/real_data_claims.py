"""What the experiment on real data claims, part by part."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerwise.experiments.claims import Claim, by_seed
from layerwise.experiments.over_seeds import bound, combined

SUMMARY = (
    "Two-layer networks on real images, whose pixels are centred and divided by one number, so that their anisotropy "
    "stays; mean and number are those of all images, held-out ones included. First the labels are a teacher's, "
    "F⋆ tanh(G⋆x) + ε, and the features are read off the mean outer product of the network's gradients. SGD misses "
    "them. Adam comes near, against the linear theory: much of the unevenness lies along single pixels, and rotated "
    "pixels mostly take Adam away from them. SOAP, which finds its own axes, finds them in both bases. Between Adam "
    "and the nearest of FOOF, KFAC and EKFAC, which invert the inputs' covariance, there is no clear order and none is "
    "claimed: in preset paper Adam was nearer on three of three seeds of digits and on one of three of MNIST; EKFAC's "
    "held-out loss is mostly below Adam's. Second, real labels: a network learns 0–4, and a ridge head on its hidden "
    "layer learns 5–9 from few examples. All learn the source. SGD's hidden weights move along the eigenvectors of "
    "large eigenvalues, KFAC's and FOOF's along those of small ones. SOAP's layer serves the other labels better than "
    "KFAC's, and mostly Muon's does; more damping mostly helps KFAC, whose layer is mostly no better than an untrained "
    "one. That SOAP's and Muon's are better than an untrained one is not claimed: each was so on all three seeds of "
    "MNIST (preset paper), but on eight of twelve of digits (preset laptop, seeds 0, 1 and 5–14). Pixels serve better "
    "than all. (The layers of the presets have 32 units, fewer than there are pixels, so the untrained layer is the "
    "fairer measure.) Rates are chosen by the least distance with known features, by the held-out source loss with "
    "labels, never by the target; a training that breaks off counts as distance 1 and loss ∞."
)
SOURCE = "beyond the paper"
CHOSEN = "(Threshold set after seeds 0–2 of digits.)"
TEACHERS = "First declared for every seed, after seeds 0–2; of seeds 3 and 4, not used for that, it failed on seed 4."
TESTED = "(Declared after seeds 0–2; held on seeds 5–8 of digits, not used before.)"
MOSTLY = (
    "First declared for every seed, after seeds 0–4 at most; it failed on one of the seeds 5–8 of digits. Declared "
    "for most seeds instead, it held on {} of the six seeds 9–14, not used before."
)
NOT_SERVED = (
    "The opposite would be expected if features that are found in all directions served other labels. KFAC's layer was "
    "better after all on one seed of three both of digits and of MNIST (preset paper), on two of the seeds 5–8 of "
    "digits and on one of the six seeds 9–14 (preset laptop)."
)
MOST = {"test": "share", "share": 0.6}
HALF = {"test": "share", "share": 0.5}
MISSED = "First 0.35, set after seeds 0–2; it held on seeds 1000 to 1007, but with 0.351 on one of them."
ADAM = (
    "First declared for every seed, after seeds 0–2: a distance of at most 0.25 on pixels, and 1.4 times it on rotated "
    "ones. Of the seeds 1000 to 1004, not used before, two have 0.30 and 0.32 on pixels, and two have ratios of 0.98 "
    "and 1.35. So the distance is 0.4 now, and the ratio 1.1 for half of the seeds."
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
        bound(cell, "sgd/dist", ">=", 0.3, "SGD misses the features at each of its rates.", note=MISSED, **common),
        bound(cell, "adam/dist", "<=", 0.4, "Adam comes near the features.", note=ADAM, **common),
        Claim(
            name=f"{cell}/adam-before-sgd",
            statement="Adam is nearer to the features than SGD (ratio).",
            quantity=combined(cell, ["adam/dist", "sgd/dist"], lambda adam, sgd: adam / sgd),
            relation="<=",
            target=0.85,
            note="Set after seeds 1000 to 1004 of digits, where the largest is 0.68.",
            span=(0, math.inf),
            **common,
        ),
        bound(cell, "soap/dist", "<=", 0.25, f"SOAP finds the features. {TESTED}", **common),
        Claim(
            name=f"{cell}/ekfac-has-less-loss",
            statement="EKFAC's least held-out loss is below Adam's all the same, for most teachers.",
            quantity=combined(cell, ["ekfac/least_loss", "adam/least_loss"], lambda ekfac, adam: ekfac / adam),
            relation="<",
            target=1.0,
            test="share",
            share=0.6,
            note=TEACHERS,
            **common,
        ),
    ]


def rotated_claims(rotated: str, known: str, seeds: int) -> list[Claim]:
    """What the basis of pixels is worth."""
    common = _common(seeds)
    return [
        bound(rotated, "soap/dist", "<=", 0.25, f"SOAP finds the features of rotated pixels. {TESTED}", **common),
        Claim(
            name=f"{rotated}/adam-needs-pixels",
            statement="Rotated pixels take Adam farther from the features, for most teachers.",
            quantity=ratio_between((rotated, "adam/dist"), (known, "adam/dist")),
            relation=">=",
            target=1.1,
            note=ADAM,
            span=(0, math.inf),
            **common | HALF,
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


def short_label_claims(cell: str, seeds: int) -> list[Claim]:
    """What a few steps are enough for: the source labels, by four members that are quick."""
    names = ("sgd", "adam", "foof", "kfac")
    return [
        Claim(
            name=f"{cell}/learned",
            statement="SGD, Adam, FOOF and KFAC learn most of the labels that they are trained on (least accuracy).",
            quantity=combined(cell, [f"{name}/source" for name in names], lambda *found: min(found)),
            relation=">=",
            target=0.85,
            note="Set after seeds 1000 to 1011 of preset smoke, where the least is 0.95.",
            span=(0, 1),
            **_common(seeds),
        )
    ]


def label_claims(cell: str, members: Sequence[str], *, each: int, least: float, width: int, seeds: int) -> list[Claim]:
    """Whose hidden layer serves other labels, with `each` examples of every target label."""
    common, at = _common(seeds), f"target@{each}"

    def gain(name: str, first: str, second: str, statement: str, **others: Any) -> Claim:
        """The accuracy with the layer of one member less that with another."""
        quantity = combined(cell, [f"{first}/{at}", f"{second}/{at}"], lambda a, b: a - b)
        statement = f"{statement}: the gain in accuracy with {each} examples of each."
        chosen = {"relation": ">", "target": 0.0} | common | others
        return Claim(name=f"{cell}/{name}", statement=statement, quantity=quantity, **chosen)

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
            statement=f"No member's hidden layer, of {width} units, serves the other labels as well as pixels do "
            f"({each} examples each): the best accuracy less that of pixels.",
            quantity=combined(
                cell, [f"pixels/{at}", *(f"{name}/{at}" for name in members)], lambda pixels, *o: max(o) - pixels
            ),
            relation="<",
            target=0.0,
            **common,
        ),
        gain(
            "kfac-not-before-untrained",
            "kfac",
            "random",
            "KFAC's hidden layer serves the other labels no better than an untrained one, on most seeds",
            relation="<=",
            note=NOT_SERVED,
            **MOST,
        ),
        gain(
            "soap-before-kfac",
            "soap",
            "kfac",
            "SOAP's hidden layer serves the other labels better than KFAC's, on most seeds",
            note="First declared for every seed, after seeds 0–2 and 5–8 of digits; it held on seeds 9–14, not used "
            "before, and failed by 0.005 on one of the seeds 11000 and 11001.",
            **MOST,
        ),
        gain(
            "muon-before-kfac",
            "muon",
            "kfac",
            "Muon's hidden layer serves the other labels better than KFAC's, on most seeds",
            note=MOSTLY.format("five"),
            **MOST,
        ),
        gain(
            "damping-helps",
            "kfac-damped",
            "kfac",
            "More damping makes KFAC's hidden layer serve the other labels better, on most seeds",
            note=MOSTLY.format("six"),
            **MOST,
        ),
    ]
