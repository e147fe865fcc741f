"""What was measured, as plain numbers: no tensors, so that a report can be kept and written to JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Side:
    """Second moment of a layer's inputs, or of its output gradients, over examples and positions."""

    size: int
    """Features, the bias column included."""
    rows: int
    """Vectors that it was estimated from; fewer than `size` cannot show every direction."""
    rms: float
    """Root mean square of an entry."""
    condition: float
    """Largest eigenvalue over the smallest that is not rounding."""
    effective_rank: float
    """``exp(−Σ μ log μ)`` of the eigenvalues divided by their sum."""
    top_share: float
    """Part of the trace in the largest eigenvalue: 1 where all vectors have one direction."""
    of: int
    """Features that the spectrum was computed of; fewer than `size` where that was too large (a principal part)."""


@dataclass(frozen=True)
class Layer:
    """One block of parameters."""

    name: str
    kind: str
    shape: tuple[int, int, int]
    """Groups K, outputs O, inputs I (bias column included)."""
    numel: int
    trained: bool
    """Whether its parameters require gradients as the model was given."""
    place: int
    """Order in which layers are called; −1 for one that was not."""
    parameters: tuple[str, ...]
    weight_rms: float
    gradient_norm: float
    """Of the mean loss."""
    gradient_top_share: float | None
    """``σ₁² / Σσ²`` of the gradient as a matrix: 1 for a gradient of rank one."""
    noise_scale: float
    """``tr Σ / |∇L|²``: examples at which noise and gradient of a batch are equally large."""
    curvature_share: float
    """Part of the trace of the Fisher matrix."""
    inputs: Side | None
    outgrads: Side | None
    kronecker_error: float | None
    """``‖F − G ⊗ A‖ / ‖F‖`` in Frobenius norm, F the layer's Fisher matrix."""
    kronecker_error_se: float | None
    """Standard error of the former."""
    reach: float
    """Decrease of the loss that the layer's own damped K-FAC step predicts, noise of the gradient subtracted; at most
    the loss. Where spectra are of some features (`Side.of`), of those."""
    out_of_reach: float | None
    """Part of `reach` that lies in directions which 1000 steps of gradient descent do not reach."""
    alignment: float | None = None
    """CKA of the layer's tangent kernel with the targets."""


@dataclass(frozen=True)
class Site:
    """A place where a nonlinearity is applied."""

    module: str
    function: str
    place: int
    """Order in which nonlinearities are called."""
    units: int
    dead: float
    """Part of the units whose derivative is zero on all data."""
    saturated: float
    """Part of the units that are flat (derivative below a twentieth of its largest) on three quarters of the data."""
    mean_derivative: float


@dataclass(frozen=True)
class Attention:
    """A softmax over positions."""

    module: str
    heads: int
    collapsed: float
    """Part of the heads that attend to one position nearly everywhere."""
    entropy: float
    """Mean entropy over that of uniform attention."""


@dataclass(frozen=True)
class Signal:
    """What goes into a module with parameters, and what comes out."""

    module: str
    kind: str
    place: int
    rms_in: float
    rms_out: float
    variation: float
    """Part of the input's mean square that differs between examples; 0 where all examples look the same."""
    finite: bool
    twins: float = 0.0
    """Part of the weight's rows that are copies of another row."""


@dataclass(frozen=True)
class Inputs:
    """Features of the data as the model gets them; None of all these for integer inputs."""

    features: int
    rms: float
    largest_std: float
    smallest_std: float
    """Among features that are not constant."""
    offset: float
    """Median over features of |mean| / standard deviation."""
    spread: float
    """Largest standard deviation of a feature over the median one."""
    constant: float
    """Part of the features that never change."""
    common: float | None = None
    """Of inputs that are vectors: part of the variance of their features, each divided by its standard deviation, that
    lies in one direction. Near 1 features are copies of one another."""


@dataclass(frozen=True)
class Targets:
    """Labels or values, and how far the model is with them."""

    kind: str
    """"classes", "values" or "other"."""
    terms: int
    classes: int | None
    largest_class: float | None
    """Part of the terms that have the most frequent label."""
    smallest_class: float | None
    present: int | None
    """Classes that occur."""
    entropy: float | None
    """Of the labels, in nats."""
    mean: float | None
    rms: float | None
    positions: int
    """Terms of one example."""
    constant_loss: float | None
    """Loss of the best constant prediction."""
    shuffled_z: float | None = None
    """Alignment of kernel and labels in standard deviations above that with shuffled labels."""


@dataclass(frozen=True)
class Step:
    """What an optimizer's next step would do, by the quadratic model ``L − η ∇Lᵀd + ½ η² dᵀF d`` along its d."""

    name: str
    rate: float
    """The best rate, as a multiple of the optimizer's own unit (for `lw.optim` with AdamW's size, its `lr`)."""
    predicted: float
    """Decrease of the loss at that rate."""
    measured: float | None
    """What the loss does there."""
    size: float
    """``‖η d‖ / ‖θ‖``."""
    layers: Mapping[str, float] = field(default_factory=dict)
    """The same for each layer."""
    seconds: float = 0.0


@dataclass(frozen=True)
class OwnStep:
    """The next step of the optimizer that was given."""

    name: str
    rate: float
    best_multiple: float
    """The rate that the quadratic model finds best, over the one that is set."""
    predicted: float
    """Decrease of the loss at the rate that is set; negative: an increase."""
    best: float
    """Decrease at the best rate."""
    measured: float
    missing: tuple[str, ...]
    """Trained parameters that the optimizer does not have."""


@dataclass(frozen=True)
class Measurements:
    """All of them."""

    loss: float
    loss_se: float
    likelihood: str
    examples: int
    batches: int
    parameters: int
    layers: tuple[Layer, ...]
    sites: tuple[Site, ...] = ()
    attention: tuple[Attention, ...] = ()
    signals: tuple[Signal, ...] = ()
    inputs: Inputs | None = None
    targets: Targets | None = None
    steps: tuple[Step, ...] = ()
    own_step: OwnStep | None = None
    frozen: tuple[str, ...] = ()
    """Parameters without `requires_grad`."""
    unused: tuple[str, ...] = ()
    """Parameters that no gradient reaches."""
    broken: tuple[str, ...] = ()
    """Modules whose output is NaN or infinite, the first one called first."""
    broken_examples: int = 0
    """Examples of the first batch with values that are NaN or infinite."""
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    def best_step(self) -> float:
        """The largest predicted decrease of a step."""
        return max((step.predicted for step in self.steps), default=float(sum(layer.reach for layer in self.layers)))
