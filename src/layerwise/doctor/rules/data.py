"""Inputs and targets."""

import math
from collections.abc import Iterator

from layerwise.doctor.findings import Finding, number
from layerwise.doctor.measurements import Layer, Measurements

LARGE, SMALL = 20.0, 0.02
"""Root mean square of inputs, beyond which their size is a fault."""
SPREAD = 30.0
"""Largest over median standard deviation of features."""
COMMON = 0.95
"""Part of the variance of features in one direction, from which they are nearly copies of one another."""
OFFSET = 10.0
"""|mean| over standard deviation."""
CONSTANT = 0.5
RARE = 0.1
"""A class with less than this part of its even share is rare."""
UNEVEN = 0.1
"""Entropy that labels lack, as a part of that of even ones, from which rare classes are a fault."""
LARGEST_SHARE = 0.7
SHUFFLED = 3.0
"""Standard deviations above shuffled labels, below which labels may be unrelated."""
SURELY_SHUFFLED = 2.0
"""The same, below which that is a severe finding: 2 to 3 is also seen where labels are hard to see at first."""
TARGET_LARGE = 10.0
ABOVE_CHANCE = 1.5
"""Loss over that of even probabilities, from which outputs are too large."""
COSTLY = 4.0
"""The same, from which that is severe: half the loss of even probabilities then takes SGD about twice the steps. Below,
the excess costs some twenty steps of SGD or Adam at most."""


def input_scale(measured: Measurements) -> Iterator[Finding]:
    """Features that are too large, too small or of very different sizes; that are far from zero; that never change."""
    x = measured.inputs
    if x is None:
        return
    first = _first(measured)
    names = (first.name,) if first is not None else ()
    gain = _gain(first, measured)
    condition = (
        ""
        if first is None or first.inputs is None
        else f" Inputs of `{first.name}` have condition {_kappa(first.inputs.condition)}."
    )
    if x.constant >= 1.0:
        yield Finding(
            "constant-features",
            "severe",
            gain,
            "No input feature ever changes.",
            "All examples are equal.",
            "Check how the data is loaded.",
            names,
        )
        return
    if x.offset > OFFSET:
        yield Finding(
            "input-offset",
            "severe",
            gain,
            f"Input features are far from zero: their mean is {number(x.offset, 3)} standard deviations away.",
            f"Median over {x.features} features; a single direction then has most of the input's second "
            f"moment.{condition}",
            "Subtract each feature's mean over the training data, and divide by its standard deviation.",
            names,
        )
    elif x.spread > SPREAD:
        yield Finding(
            "input-scale",
            "severe",
            gain,
            f"Input features have very different sizes: the largest standard deviation is {number(x.spread, 3)} times "
            "the median one.",
            f"Standard deviations lie between {number(x.smallest_std, 3)} and {number(x.largest_std, 3)}.{condition} "
            "Gradient descent needs about that many steps along the flat directions; FOOF and K-FAC would not.",
            "Divide each feature by its standard deviation.",
            names,
        )
    elif not SMALL <= x.rms <= LARGE:
        how = "large" if x.rms > LARGE else "small"
        yield Finding(
            "input-scale",
            "severe",
            gain,
            f"Inputs are very {how}: their root mean square is {number(x.rms, 3)}.",
            f"Initialisations expect about 1; curvature of the first layer grows with its square.{condition}",
            "Subtract the mean of the training data and divide by its standard deviation.",
            names,
        )
    if x.common is not None and x.common >= COMMON:
        yield Finding(
            "anisotropic-inputs",
            "severe",
            max(gain, measured.best_step()),
            "Input features are nearly copies of one another.",
            f"{_percent(x.common)} of the variance of {x.features} features, each of size one, lies in one direction."
            f"{condition} What tells the features apart is hardly seen: SGD needs about that many steps to learn it.",
            "Decorrelate (whiten) the inputs, or precondition the first layer (FOOF and K-FAC).",
            names,
            ("input-offset", "input-scale", "not-finite"),
        )
    if CONSTANT <= x.constant < 1.0 or 0 < x.constant < CONSTANT:
        severe = x.constant >= CONSTANT
        yield Finding(
            "constant-features",
            "severe" if severe else "note",
            gain * x.constant,
            f"{_percent(x.constant)} of the {x.features} input features never change.",
            "Their standard deviation is zero over the examples seen: their weights learn nothing that a bias would "
            "not.",
            "Leave them out, or check the preprocessing.",
            names,
        )


def class_imbalance(measured: Measurements) -> Iterator[Finding]:
    """Few classes with most of the labels; not asked of sequences, where words are always unevenly frequent."""
    y = measured.targets
    if y is None or y.kind != "classes" or y.positions > 1 or not y.classes or y.classes < 2:
        return
    assert y.largest_class is not None
    assert y.smallest_class is not None
    assert y.entropy is not None
    assert y.present is not None
    rare = y.smallest_class * y.classes
    free = math.log(y.classes) - y.entropy
    absent = y.classes - y.present
    lopsided = y.largest_class >= max(LARGEST_SHARE, 2 / y.classes) or (
        rare < RARE and free > UNEVEN * math.log(y.classes)
    )
    if not lopsided and not (absent and y.terms >= 20 * y.classes):
        return
    missing = f" {absent} of {y.classes} classes do not occur." if absent else ""
    yield Finding(
        "class-imbalance",
        "severe" if lopsided else "moderate",
        max(free, 0.0),
        f"Classes are uneven: one has {_percent(y.largest_class)} of the labels, the rarest "
        f"{_percent(y.smallest_class)}.",
        f"{y.terms} labels, {y.classes} classes.{missing} Their frequencies alone are worth {number(free, 3)} nats, "
        "which hides how little is learned beyond them.",
        "Weight the classes (`weight=`), or sample them evenly; watch the loss of each class.",
    )


def unrelated_labels(measured: Measurements) -> Iterator[Finding]:
    """Labels with which the tangent kernel is no better aligned than with shuffled ones."""
    y = measured.targets
    if y is None or y.shuffled_z is None or y.shuffled_z > SHUFFLED:
        return
    yield Finding(
        "unrelated-labels",
        "severe" if y.shuffled_z <= SURELY_SHUFFLED else "moderate",
        max(y.constant_loss or 0.0, 0.0),
        "Targets look unrelated to the inputs, as far as this network can see.",
        f"The tangent kernel's alignment with them is {number(y.shuffled_z, 2)} standard deviations above that with "
        "shuffled targets; related ones have 5 and more.",
        "Check that inputs and targets are paired (a shuffle of one of them alone?), and how many labels are wrong.",
        follows_from=(
            "constant-features",
            "input-scale",
            "input-offset",
            "anisotropic-inputs",
            "dead-units",
            "saturated-units",
            "constant-representation",
            "identical-units",
            "exploding-activations",
            "vanishing-activations",
            "vanishing-gradients",
            "exploding-gradients",
            "not-finite",
            "class-imbalance",
            "unused",
            "output-scale",
            "collapsed-attention",
        ),
    )


def target_scale(measured: Measurements) -> Iterator[Finding]:
    """Values far from the size of outputs."""
    y = measured.targets
    if measured.likelihood != "gaussian" or y is None or y.kind != "values" or y.rms is None or y.mean is None:
        return
    if SMALL <= y.rms <= TARGET_LARGE:
        return
    how = "large" if y.rms > TARGET_LARGE else "small"
    yield Finding(
        "target-scale",
        "severe",
        abs(measured.loss - 0.5) if y.rms > TARGET_LARGE else 0.5 * y.rms**2,
        f"Targets are very {how}: their root mean square is {number(y.rms, 3)}, their mean {number(y.mean, 3)}.",
        f"The loss is {number(measured.loss, 3)}, that of the best constant {number(y.constant_loss or math.nan, 3)}; "
        "outputs begin near zero and have the size of one.",
        "Subtract the targets' mean and divide by their standard deviation.",
    )


def output_scale(measured: Measurements) -> Iterator[Finding]:
    """A loss above that of a constant prediction; severe where it takes long to undo."""
    y = measured.targets
    if y is None or y.constant_loss is None:
        return
    if y.kind == "classes" and y.classes:
        chance = math.log(y.classes)
    elif measured.likelihood == "bernoulli":
        chance = y.constant_loss  # of several labels, whose number is not known here: at most that of even ones
    else:
        return
    if measured.loss <= ABOVE_CHANCE * chance:
        return
    costly = measured.loss > COSTLY * chance
    yield Finding(
        "output-scale",
        "severe" if costly else "moderate",
        measured.loss - y.constant_loss,
        f"The loss, {number(measured.loss, 3)}, is {'far ' if costly else ''}above that of even probabilities, "
        f"{number(chance, 3)}: outputs are large and wrong.",
        f"A constant prediction has {number(y.constant_loss, 3)}. {_percent(1 - y.constant_loss / measured.loss)} of "
        "the loss is there because of the size of the outputs.",
        "Make the last layer's initial weights smaller (or zero), or restart from before the loss rose.",
        follows_from=(
            "input-scale",
            "input-offset",
            "exploding-activations",
            "not-finite",
            "rate-too-high",
            "identical-units",
            "saturated-units",
        ),
    )


def _first(measured: Measurements) -> Layer | None:
    """The first layer with factors."""
    layers = [layer for layer in measured.layers if layer.inputs is not None and layer.place >= 0]
    return min(layers, key=lambda layer: layer.place, default=None)


def _gain(layer: Layer | None, measured: Measurements) -> float:
    if layer is None:
        return measured.best_step()
    return layer.reach * (1.0 if layer.out_of_reach is None else layer.out_of_reach)


def _kappa(value: float) -> str:
    return "infinite" if math.isinf(value) else f"{number(value, 1)}"


def _percent(value: float) -> str:
    return f"{number(100 * value, 3)} %"


DATA_RULES = (input_scale, class_imbalance, unrelated_labels, target_scale, output_scale)
