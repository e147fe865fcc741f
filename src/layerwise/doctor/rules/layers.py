"""Single layers: which are trained, and how far gradient descent gets in each."""

import math
from collections.abc import Iterator

from layerwise.doctor.findings import Finding, number
from layerwise.doctor.measurements import Layer, Measurements, Side

OUT_OF_REACH = 0.5
"""Part of a layer's predicted decrease that gradient descent does not reach, from which it is said."""
CONDITION = 1e4
NOISE = 20.0
"""Gradient noise scale over the examples seen, from which a batch of them is noise."""
KRONECKER = 1.0
CAUSES = (
    "input-scale",
    "input-offset",
    "constant-features",
    "exploding-activations",
    "vanishing-activations",
    "dead-units",
    "saturated-units",
    "identical-units",
    "constant-representation",
)
"""What makes second moments anisotropic."""


def frozen(measured: Measurements) -> Iterator[Finding]:
    """Parameters without `requires_grad`."""
    layers = [layer for layer in measured.layers if not layer.trained]
    if not measured.frozen:
        return
    reach = sum(layer.reach for layer in layers)
    share = sum(layer.numel for layer in layers) / max(measured.parameters, 1)
    yield Finding(
        "frozen",
        "severe",
        reach,
        f"{_list(layer.name for layer in layers) or _list(measured.frozen)} {'is' if len(layers) == 1 else 'are'} "
        f"frozen: {number(100 * share, 2)} % of the parameters.",
        "`requires_grad` is False. Measured as if trained, these layers' own steps predict a decrease of "
        f"{number(reach, 2)}.",
        "Call `requires_grad_(True)` on them, unless that is meant.",
        tuple(layer.name for layer in layers),
        ("not-finite",),
    )


def unused(measured: Measurements) -> Iterator[Finding]:
    """Parameters that no gradient reaches."""
    blocked = [layer for layer in measured.layers if set(layer.parameters) & set(measured.unused) and layer.numel > 1]
    blocked = [layer for layer in blocked if layer.trained]
    if not blocked or measured.broken:
        return
    share = sum(layer.numel for layer in blocked) / max(measured.parameters, 1)
    whole = share > 0.02
    yield Finding(
        "unused",
        "severe" if whole else "moderate",
        min(share / max(1 - share, 1e-3) * measured.best_step(), max(measured.loss, 0.0)),
        f"No gradient reaches {_list(layer.name for layer in blocked)}: {number(100 * share, 2)} % of the parameters.",
        f"Their gradient is zero on all {measured.examples} examples.",
        "Look for a `detach()`, a `no_grad()` or a branch that is never taken; a gate or weight of zero has the same "
        "effect.",
        tuple(layer.name for layer in blocked),
        (
            "dead-units",
            "not-finite",
            "identical-units",
            "constant-features",
            "vanishing-gradients",
            "vanishing-activations",
        ),
    )


def anisotropy(measured: Measurements) -> Iterator[Finding]:
    """Layers in which gradient descent does not reach most of the predicted decrease; one finding for each side."""
    total = sum(layer.reach for layer in measured.layers) or 1.0
    by_side: dict[bool, list[Layer]] = {True: [], False: []}
    for layer in measured.layers:
        if layer.inputs is None or layer.outgrads is None or layer.out_of_reach is None:
            continue
        if layer.out_of_reach < OUT_OF_REACH or layer.reach < 0.02 * total:
            continue
        inputs = layer.inputs.condition >= layer.outgrads.condition
        if (layer.inputs if inputs else layer.outgrads).condition >= CONDITION:
            by_side[inputs].append(layer)
    for inputs, layers in by_side.items():
        if layers:
            yield _anisotropic(layers, inputs)


def _anisotropic(layers: list[Layer], inputs: bool) -> Finding:
    layers = sorted(layers, key=lambda layer: -layer.reach * (layer.out_of_reach or 0.0))
    worst, others = layers[0], layers[1:]
    side = worst.inputs if inputs else worst.outgrads
    assert side is not None
    assert worst.out_of_reach is not None
    what = "Inputs" if inputs else "Output gradients"
    cure = "FOOF and K-FAC" if inputs else "K-FAC and Shampoo"
    also = f" The same holds for {_list(layer.name for layer in others)}." if others else ""
    return Finding(
        "anisotropic-inputs" if inputs else "anisotropic-gradients",
        "moderate" if worst.out_of_reach >= 0.8 else "note",
        sum(layer.reach * (layer.out_of_reach or 0.0) for layer in layers),
        f"{what} of `{worst.name}` have condition {number(side.condition, 1)}: SGD needs about that many steps along "
        "the flat "
        f"directions; {cure} would not.",
        f"{_ranks(side)} {number(100 * worst.out_of_reach, 2)} % of the layer's predicted decrease, "
        f"{number(worst.reach, 2)}, lies in "
        f"directions that 1000 steps of gradient descent do not reach.{also}",
        f"Precondition these layers ({cure})" + (", or normalise their inputs." if inputs else "."),
        tuple(layer.name for layer in layers),
        CAUSES,
    )


def gradient_noise(measured: Measurements) -> Iterator[Finding]:
    """Gradients that are mostly noise."""
    noisy = [
        layer for layer in measured.layers if layer.noise_scale > NOISE * max(measured.examples, 1) and layer.trained
    ]
    if len(noisy) <= len(measured.layers) / 2:
        return
    finite = sorted(layer.noise_scale for layer in noisy if math.isfinite(layer.noise_scale))
    scale = finite[len(finite) // 2] if finite else math.inf
    yield Finding(
        "gradient-noise",
        "note",
        0.0,
        f"Gradients of {len(noisy)} of {len(measured.layers)} layers are noise: the noise scale is {number(scale, 1)} "
        "examples.",
        f"Seen on {measured.examples} examples; at the noise scale, noise and gradient of a batch are equally large.",
        "Larger batches, or a lower rate with more averaging; or the loss is as low as it gets.",
        tuple(layer.name for layer in noisy),
        ("unrelated-labels", "vanishing-gradients", "dead-units", "not-finite"),
    )


def kronecker_error(measured: Measurements) -> Iterator[Finding]:
    """Layers whose Fisher matrix is far from its K-FAC."""
    far = [
        layer
        for layer in measured.layers
        if layer.kronecker_error is not None
        and layer.kronecker_error - 2 * (layer.kronecker_error_se or 0.0) > KRONECKER
        and layer.curvature_share > 0.02
    ]
    if not far:
        return
    worst = max(far, key=lambda layer: layer.curvature_share)
    yield Finding(
        "kronecker-error",
        "note",
        0.0,
        f"K-FAC's curvature of `{worst.name}` is {number(100 * (worst.kronecker_error or 0.0), 2)} % off.",
        f"‖F − G ⊗ A‖ / ‖F‖ = {number(worst.kronecker_error, 2)} ± {number(worst.kronecker_error_se, 1)}; the layer "
        f"has {number(100 * worst.curvature_share, 2)} % of the curvature.",
        "Prefer EKFAC, whose scalings are exact in K-FAC's basis, or more damping.",
        tuple(layer.name for layer in far),
    )


def _ranks(side: Side) -> str:
    few = f", of {side.rows} vectors" if side.rows < 4 * side.size else ""
    one = f"{number(100 * side.top_share, 2)} % of the trace is in one direction"
    return f"Their effective rank is {number(side.effective_rank, 3)} of {side.size}{few}; {one}."


def _list(names: object) -> str:
    shown = list(dict.fromkeys(f"`{name}`" for name in names))  # type: ignore[attr-defined]
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def by_share(measured: Measurements) -> list[Layer]:
    """Layers by their part of the curvature, largest first."""
    return sorted(measured.layers, key=lambda layer: -layer.curvature_share)


LAYER_RULES = (frozen, unused, anisotropy, gradient_noise, kronecker_error)
