"""Units, attention, and the size of signals and gradients from layer to layer."""

import math
from collections.abc import Iterator

from layerwise.doctor.findings import Finding, number
from layerwise.doctor.measurements import Layer, Measurements, Signal

DEAD_SEVERE, DEAD_MODERATE = 0.4, 0.1
SATURATED_SEVERE, SATURATED_MODERATE = 0.4, 0.15
COLLAPSED_SEVERE = 0.4
GROWTH = 30.0
"""Quotient of two layers' signals from which they explode."""
DECAY = 1e-2
BACK = 1e-3
"""Quotient of the first and the last layers' output gradients below which they vanish."""
GROWTH_BACK = 200.0
TWINS = 0.5
VARIATION = 1e-3


def not_finite(measured: Measurements) -> Iterator[Finding]:
    """NaN or infinite outputs."""
    if measured.broken_examples:
        yield Finding(
            "not-finite",
            "severe",
            math.inf,
            f"{measured.broken_examples} examples of the first batch have inputs or targets that are NaN or infinite.",
            "One of them in a batch makes its loss, and every gradient, NaN.",
            "Clean the data: `torch.isfinite(x)` tells which; look for divisions by zero in the preprocessing.",
        )
    elif measured.broken:
        first = measured.broken[0] or "the model itself"
        yield Finding(
            "not-finite",
            "severe",
            math.inf,
            f"The output of `{first}` is NaN or infinite, and so is all that follows.",
            f"{len(measured.broken)} modules give values that are not finite; `{first}` is the first one called.",
            "Look at its inputs and weights; lower the rate, clip gradients, and restart from a checkpoint before it.",
            measured.broken,
        )


def dead_units(measured: Measurements) -> Iterator[Finding]:
    """Units that pass no gradient on any example."""
    sites = [site for site in measured.sites if site.dead >= DEAD_MODERATE and site.units > 1]
    if not sites:
        return
    worst = max(sites, key=lambda site: site.dead)
    units = sum(site.units * site.dead for site in sites)
    of = sum(site.units for site in measured.sites)
    yield Finding(
        "dead-units",
        "severe" if worst.dead >= DEAD_SEVERE else "moderate",
        _lost(worst.dead, measured),
        f"{_percent(worst.dead)} of the {worst.units} units of `{_place(worst.module)}` ({worst.function}) are dead.",
        f"Their derivative is zero on all {measured.examples} examples, so their weights get no gradient; {units:.0f} "
        f"of {of} units in all, in {_list(_place(site.module) for site in sites)}.",
        "Initialise their biases at zero, use a leaky nonlinearity, or lower the rate that killed them.",
        tuple(_place(site.module) for site in sites),
        ("not-finite", "input-offset", "input-scale", "identical-units"),
    )


def saturated_units(measured: Measurements) -> Iterator[Finding]:
    """Units in the flat part of a sigmoid or tanh."""
    sites = [site for site in measured.sites if site.saturated >= SATURATED_MODERATE and site.units > 1]
    if not sites:
        return
    worst = max(sites, key=lambda site: site.saturated)
    yield Finding(
        "saturated-units",
        "severe" if worst.saturated >= SATURATED_SEVERE else "moderate",
        _lost(worst.saturated, measured),
        f"{_percent(worst.saturated)} of the {worst.units} units of `{_place(worst.module)}` ({worst.function}) are "
        "saturated.",
        "On three examples of four their derivative is below a twentieth of its largest; the mean is "
        f"{number(worst.mean_derivative, 2)}. Seen in {_list(_place(site.module) for site in sites)}.",
        "Make the weights before them smaller, or put a normalisation there.",
        tuple(_place(site.module) for site in sites),
        ("not-finite", "input-offset", "input-scale"),
    )


def collapsed_attention(measured: Measurements) -> Iterator[Finding]:
    """Heads that look at one position."""
    bad = [one for one in measured.attention if one.collapsed >= COLLAPSED_SEVERE]
    if not bad:
        return
    worst = max(bad, key=lambda one: one.collapsed)
    yield Finding(
        "collapsed-attention",
        "severe",
        _lost(worst.collapsed, measured),
        f"{_percent(worst.collapsed)} of the heads of `{_place(worst.module)}` attend to a single position.",
        f"The entropy of their attention is {number(worst.entropy, 2)} of that of even attention: the softmax is "
        "saturated and passes hardly any gradient to queries and keys. Seen in "
        f"{_list(_place(one.module) for one in bad)}.",
        "Divide scores by √d, normalise queries and keys, or make their initial weights smaller.",
        tuple(_place(one.module) for one in bad),
        ("not-finite", "exploding-activations"),
    )


def identical_units(measured: Measurements) -> Iterator[Finding]:
    """Rows of a weight that are equal: they get equal gradients and stay equal."""
    hidden = [signal for signal in measured.signals if signal.module]
    bad = [signal for signal in hidden[:-1] if signal.twins >= TWINS]
    if not bad:
        return
    worst = max(bad, key=lambda signal: signal.twins)
    yield Finding(
        "identical-units",
        "severe",
        _lost(worst.twins, measured),
        f"{_percent(worst.twins)} of the units of `{worst.module}` have the same weights as another unit.",
        "Units with equal weights in and out get equal gradients and never differ. Seen in "
        f"{_list(signal.module for signal in bad)}.",
        "Initialise weights at random; zeros are for biases and for the last layer of a residual branch.",
        tuple(signal.module for signal in bad),
        ("not-finite",),
    )


def signal_size(measured: Measurements) -> Iterator[Finding]:
    """Signals that grow or shrink on their way through the network."""
    signals = [
        signal for signal in measured.signals if signal.module and signal.rms_out > 0 and signal.kind != "Embedding"
    ]
    if len(signals) < 3:
        return
    start, rest = signals[0], signals[1:]
    # What the last layer alone makes large is the outputs' size, and no growth from layer to layer.
    sizes = {signal.module: max(signal.rms_in, signal.rms_out) for signal in rest[:-1]}
    sizes[rest[-1].module] = rest[-1].rms_in
    largest = max(rest, key=lambda signal: sizes[signal.module])
    size = sizes[largest.module]
    base = start.rms_out
    if base > 0 and size / base > GROWTH and size > GROWTH / 3:
        yield Finding(
            "exploding-activations",
            "severe",
            max(measured.loss - _constant(measured), 0.0) + measured.best_step(),
            f"Signals grow {number(size / base, 2)} times between `{start.module}` and `{largest.module}`.",
            f"Their root mean square goes from {number(base, 2)} to {number(size, 2)}, over {len(rest)} layers; later "
            "layers outweigh earlier ones by as much.",
            "Normalise the residual stream (LayerNorm before each branch, and before the output), or scale each "
            "branch by 1/√depth.",
            (largest.module,),
            ("not-finite",),
        )
    tail = [signal for signal in rest if signal.rms_in > 0]
    smallest = min(tail, key=lambda signal: signal.rms_in, default=None)
    if smallest is not None and base > 0 and smallest.rms_in / base < DECAY:
        yield Finding(
            "vanishing-activations",
            "severe",
            measured.best_step(),
            f"Signals shrink to {number(smallest.rms_in / base, 2)} of their size between `{start.module}` and "
            f"`{smallest.module}`.",
            f"Their root mean square goes from {number(base, 2)} to {number(smallest.rms_in, 2)}.",
            "Use an initialisation that keeps variances (He for ReLU), or a normalisation.",
            (smallest.module,),
            ("not-finite", "dead-units", "identical-units", "input-offset", "input-scale"),
        )


def constant_representation(measured: Measurements) -> Iterator[Finding]:
    """Layers whose inputs are the same for all examples."""
    bad = [
        signal
        for signal in measured.signals[1:]
        if signal.module and signal.variation < VARIATION and not _positional(signal) and signal.rms_in > 0
    ]
    if not bad:
        return
    worst = bad[0]
    yield Finding(
        "constant-representation",
        "severe",
        max(_constant(measured), measured.best_step()),
        f"All examples look the same to `{worst.module}`.",
        f"{_percent(worst.variation)} of the mean square of its inputs differs between examples. Seen in "
        f"{_list(signal.module for signal in bad)}.",
        "Centre what is constant away (a normalisation over the batch), or make the weights before it larger.",
        tuple(signal.module for signal in bad),
        (
            "not-finite",
            "input-offset",
            "constant-features",
            "dead-units",
            "saturated-units",
            "identical-units",
            "vanishing-activations",
            "vanishing-gradients",
            "input-scale",
        ),
    )


def gradient_flow(measured: Measurements) -> Iterator[Finding]:
    """Output gradients of the first layers against those of the last."""
    layers = [
        layer
        for layer in measured.layers
        if layer.outgrads is not None and layer.place >= 0 and layer.kind != "Embedding"
    ]
    layers = sorted(
        (layer for layer in layers if layer.outgrads and layer.outgrads.rms > 0), key=lambda layer: layer.place
    )
    if len(layers) < 3:
        return
    first, last = layers[0], layers[-1]
    ratio = _size(first) / _size(last)
    if ratio < BACK:
        starved = [layer for layer in layers if _size(layer) / _size(last) < 10 * BACK]
        yield Finding(
            "vanishing-gradients",
            "severe",
            max(sum(layer.reach for layer in starved), measured.best_step() * len(starved) / len(layers)),
            f"Gradients shrink to {number(ratio, 2)} of their size on the way from `{last.name}` back to "
            f"`{first.name}`.",
            f"Over {len(layers)} layers; {len(starved)} of them have output gradients below {10 * BACK:g} of the last "
            "one's, and hardly move under SGD.",
            "Use ReLU-like nonlinearities with a matching initialisation, residual connections, or a normalisation; "
            "K-FAC and Adam rescale, but noise as well.",
            tuple(layer.name for layer in starved),
            (
                "not-finite",
                "saturated-units",
                "dead-units",
                "identical-units",
                "collapsed-attention",
                "exploding-activations",
                "vanishing-activations",
            ),
        )
    elif ratio > GROWTH_BACK:
        yield Finding(
            "exploding-gradients",
            "severe",
            measured.best_step(),
            f"Gradients grow {number(ratio, 2)} times on the way from `{last.name}` back to `{first.name}`.",
            f"Over {len(layers)} layers: the first ones limit the rate of all others.",
            "Make initial weights smaller, add a normalisation, or clip gradients.",
            (first.name,),
            ("not-finite", "exploding-activations"),
        )


def _size(layer: Layer) -> float:
    """Norm of the output gradient of one example, all positions together."""
    assert layer.outgrads is not None
    return layer.outgrads.rms * math.sqrt(layer.outgrads.size * max(layer.outgrads.rows, 1))


def _lost(part: float, measured: Measurements) -> float:
    """What units that do nothing would add if they did what the others do, at most the loss itself."""
    return min(part / max(1 - part, 1e-3) * measured.best_step(), max(measured.loss, 0.0))


def _constant(measured: Measurements) -> float:
    y = measured.targets
    return 0.0 if y is None or y.constant_loss is None else y.constant_loss


def _positional(signal: Signal) -> bool:
    return signal.kind in ("Embedding", "EmbeddingBag") or math.isnan(signal.variation)


def _place(module: str) -> str:
    return module or "the model"


def _list(names: object) -> str:
    shown = list(dict.fromkeys(f"`{name}`" for name in names))  # type: ignore[attr-defined]
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _percent(value: float) -> str:
    return f"{number(100 * value, 3)} %"


SIGNAL_RULES = (
    not_finite,
    dead_units,
    saturated_units,
    collapsed_attention,
    identical_units,
    signal_size,
    constant_representation,
    gradient_flow,
)
