"""Rules: functions from measurements to findings, a file for each part of training. `KINDS` lists what can be found."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from layerwise.doctor.findings import Finding
from layerwise.doctor.measurements import Measurements
from layerwise.doctor.rules.data import DATA_RULES
from layerwise.doctor.rules.layers import LAYER_RULES
from layerwise.doctor.rules.signals import SIGNAL_RULES
from layerwise.doctor.rules.steps import STEP_RULES

Rule = Callable[[Measurements], Iterator[Finding]]

RULES: tuple[Rule, ...] = (*DATA_RULES, *SIGNAL_RULES, *LAYER_RULES, *STEP_RULES)

KINDS = {
    "not-finite": "an output, or an example of the data, is NaN or infinite",
    "input-scale": "input features are too large, too small, or of very different sizes",
    "input-offset": "input features are far from zero mean",
    "constant-features": "input features never change",
    "class-imbalance": "few classes have most of the labels",
    "unrelated-labels": "labels have nothing to do with what the network sees",
    "target-scale": "values to be predicted are far from the size of the outputs",
    "output-scale": "outputs are so large that the loss is above that of a constant",
    "dead-units": "units whose derivative is zero on all data",
    "saturated-units": "units in the flat part of a bounded nonlinearity",
    "collapsed-attention": "heads that attend to one position",
    "identical-units": "units with equal weights, which stay equal",
    "exploding-activations": "signals grow from layer to layer",
    "vanishing-activations": "signals shrink from layer to layer",
    "constant-representation": "all examples look the same to a layer",
    "vanishing-gradients": "gradients shrink on their way back",
    "exploding-gradients": "gradients grow on their way back",
    "frozen": "parameters that are not trained",
    "unused": "parameters that no gradient reaches",
    "not-in-optimizer": "trained parameters that the optimizer does not have",
    "rate-too-high": "the next step of the optimizer makes the loss larger",
    "rate-too-low": "the next step of the optimizer is far smaller than it could be",
    "anisotropic-inputs": "inputs of a layer have directions that gradient descent does not reach, or are copies",
    "anisotropic-gradients": "output gradients of a layer have such directions",
    "gradient-noise": "batches are dominated by noise",
    "kronecker-error": "a layer's curvature is far from its K-FAC",
    "optimizer": "another optimizer is predicted to make more of a step",
}
"""All kinds of findings."""
UNBOUNDED = ("rate-too-high", "not-finite")
"""Kinds whose gain is what is prevented, and may be more than the loss."""


def all_findings(measured: Measurements) -> list[Finding]:
    """What every rule finds. No gain is larger than the loss, but for that of a step which would make it larger."""
    found = [finding for rule in RULES for finding in rule(measured)]
    if not measured.loss > 0:
        return found
    return [replace(one, gain=min(one.gain, measured.loss)) if one.kind not in UNBOUNDED else one for one in found]
