"""Dense, slow, float64 reference values for everything the library computes on parameter space.

Here live matrices written down as their definitions say, by `torch.func`, for models of at most a few hundred
parameters. Nothing is imported from the rest of the library and nothing is shared with it, so that agreement
means something.

The convention owned here is the flat one: parameters in the order of ``model.named_parameters()``, only those
with ``requires_grad``, a shared parameter once, each tensor row-major. The model is copied to float64, never
changed, and run in the mode (train or eval) it is in.

Likelihoods are plain keyword options, the same for all functions that take ``**options``:

| option | meaning |
|---|---|
| ``likelihood`` | ``"categorical"`` (logits), ``"gaussian"`` (½‖y−f‖²) or ``"bernoulli"`` (logits) |
| ``weight`` | weights of the classes, [C] (categorical) |
| ``ignore_index`` | label of positions that do not count (categorical); ``None``: all count |
| ``label_smoothing`` | ε of `torch.nn.functional.cross_entropy` (categorical) |
| ``class_axis`` | axis of the output that holds the C logits or values of one position |
| ``mask`` | bool, the output's shape without its class axis; a position of False does not count |
| ``examples`` | N, when the output's first axis is not N but N·T, example-major |

With s the positions of an example (everything in the output but examples and classes), z_ns ∈ R^C the output
there, m_ns ∈ {0, 1} whether it counts and w_c the class weights, an example's loss is

    ℓ_n = Σ_s m_ns w_{y_ns} (−log p(y_ns | z_ns))

and ``normalize`` says by what sums over n are divided: ``"examples"`` by N, ``"terms"`` by Σ_ns m_ns w_{y_ns}
(a Gaussian or Bernoulli position is one term, however many values it has). A mask for these two may also have
the output's whole shape: then every entry is a position, and a term, of its own.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

Inputs = Tensor | tuple | Mapping
Loss = Callable[[Tensor, Tensor], Tensor]


# --- parameters and outputs -------------------------------------------------------------------------------


def parameter_slices(model: nn.Module) -> dict[str, slice]:
    """Where each trainable parameter lies in a flat vector."""
    slices, start = {}, 0
    for name, parameter in _trainable(model).items():
        slices[name] = slice(start, start + parameter.numel())
        start += parameter.numel()
    return slices


def flat_parameters(model: nn.Module) -> Float64[Tensor, "d"]:
    """The trainable parameters as one float64 vector θ."""
    return torch.cat([p.detach().double().reshape(-1) for p in _trainable(model).values()])


def outputs(model: nn.Module, x: Inputs) -> Float64[Tensor, "*out"]:
    """f(x; θ) in float64: ``model(x)``, ``model(*x)`` for a tuple, ``model(**x)`` for a mapping."""
    f, theta = _function(model, x)
    return f(theta).detach()


def jacobian(model: nn.Module, x: Inputs) -> Float64[Tensor, "*out d"]:
    """J = ∂f(x; θ)/∂θ, the output's shape first."""
    f, theta = _function(model, x)
    return _derivative(f, theta)


def ntk(model: nn.Module, x: Inputs, x2: Inputs | None = None) -> Float64[Tensor, "rows columns"]:
    """Θ[(n,c), (m,k)] = ⟨∂f_c(x_n)/∂θ, ∂f_k(x2_m)/∂θ⟩, example-major; ``x2`` is ``x`` if not given."""
    J = jacobian(model, x).flatten(0, -2)
    J2 = J if x2 is None else jacobian(model, x2).flatten(0, -2)
    return J @ J2.T


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _double(value: Any) -> Any:
    """Floating tensors in float64; labels, masks and everything else as they are."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _arguments(x: Inputs) -> tuple[tuple, dict[str, Any]]:
    if isinstance(x, Mapping):
        return (), {name: _double(value) for name, value in x.items()}
    return (tuple(_double(value) for value in x) if isinstance(x, tuple) else (_double(x),)), {}


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Forward passes made of operators that have a second derivative.

    Fused attention and the fast path of `nn.TransformerEncoderLayer` have none; cuDNN's recurrent layers have
    no backward in eval mode at all.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _function(model: nn.Module, x: Inputs) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """θ ↦ f(x; θ) of a float64 copy of the model, and the θ it has now."""
    model = copy.deepcopy(model).double()
    args, kwargs = _arguments(x)
    theta, slices = flat_parameters(model), parameter_slices(model)
    shapes = {name: p.shape for name, p in _trainable(model).items()}

    def f(theta: Tensor) -> Tensor:
        parameters = {name: theta[where].reshape(shapes[name]) for name, where in slices.items()}
        with _plain_kernels():
            return functional_call(model, parameters, args, kwargs)

    return f, theta


def _derivative(function: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """∂function/∂θ, the function's own shape first."""
    with warnings.catch_warnings():
        # An operator without a batching rule is looped over, and right: its slowness is no news here.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        return jacrev(function)(theta).detach()


def _hessian(function: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """∂²function/∂θ² of a scalar function.

    The inner derivative must not be batched: in torch 2.13 ``jacrev(jacrev(·))`` is silently wrong, not even
    symmetric, for `nn.LayerNorm` and `nn.InstanceNorm2d`. ``jacrev(grad(·))`` agrees with finite differences.
    """
    return _derivative(grad(function), theta)


# --- likelihoods ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Likelihood:
    """The options of the module's docstring, and what they say of outputs and labels."""

    likelihood: str = "categorical"
    weight: Tensor | None = None
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    class_axis: int = -1
    mask: Tensor | None = None
    examples: int | None = None

    def __post_init__(self) -> None:
        known = ("categorical", "gaussian", "bernoulli")
        if self.likelihood not in known:
            raise ValueError(f"likelihood={self.likelihood!r} is none of {', '.join(known)}")
        if self.likelihood != "categorical" and (
            self.weight is not None or self.ignore_index is not None or self.label_smoothing
        ):
            raise ValueError(f"weight, ignore_index and label_smoothing mean nothing to {self.likelihood}")

    def arrange(self, f: Tensor) -> Float64[Tensor, "N S C"]:
        """Outputs (or targets of their shape) by example, position and class."""
        f = f.double()
        entrywise = self.likelihood != "categorical" and self.mask is not None and self.mask.shape == f.shape
        # A number an example, or a mask for single entries: every entry is a position of one class.
        z = f.unsqueeze(-1) if f.ndim == 1 or entrywise else f.movedim(self.class_axis, -1)
        return z.reshape(self.examples or f.shape[0], -1, z.shape[-1])

    def counted(self, y: Tensor | None, z: Float64[Tensor, "N S C"]) -> Float64[Tensor, "N S"]:
        """m_ns: 1 where a position counts, 0 where it is masked."""
        m = z.new_ones(z.shape[:2])
        if self.ignore_index is not None:
            m = m * (_given(y) != self.ignore_index).reshape(m.shape)
        return m if self.mask is None else m * self.mask.reshape(m.shape).to(m)

    def labels(self, y: Tensor | None, z: Float64[Tensor, "N S C"]) -> Int[Tensor, "N S"]:
        """Classes y_ns; an ignored one, which may be no class at all, is read as class 0."""
        ignored = self.counted(y, z) == 0
        return _given(y).reshape(z.shape[:2]).masked_fill(ignored, 0)

    def coefficients(self, y: Tensor | None, z: Float64[Tensor, "N S C"]) -> Float64[Tensor, "N S"]:
        """m_ns w_{y_ns}: how much a position counts."""
        counted = self.counted(y, z)
        return counted if self.weight is None else counted * self.weight.to(z)[self.labels(y, z)]

    def output_fisher(self, z: Float64[Tensor, "N S C"]) -> Float64[Tensor, "N S C C"]:
        """diag(p) − ppᵀ, I or diag(q(1−q)): the Fisher matrix of one position's distribution in z."""
        if self.likelihood == "categorical":
            p = z.softmax(-1)
            return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
        q = z.sigmoid()
        return torch.diag_embed(q * (1 - q) if self.likelihood == "bernoulli" else torch.ones_like(z))

    def losses(self, y: Tensor, z: Float64[Tensor, "N S C"]) -> Float64[Tensor, "N"]:
        """ℓ_n, all positions of an example summed."""
        position = {"categorical": self._cross_entropy, "gaussian": _half_square, "bernoulli": _binary}
        target = y if self.likelihood == "categorical" else self.arrange(y)
        return (self.counted(y, z) * position[self.likelihood](target, z)).sum(1)

    def _cross_entropy(self, y: Tensor, z: Float64[Tensor, "N S C"]) -> Float64[Tensor, "N S"]:
        """(1−ε) w_y (−log p_y) + ε/C Σ_c w_c (−log p_c), which is what PyTorch does with class weights."""
        w = z.new_ones(z.shape[-1]) if self.weight is None else self.weight.to(z)
        surprise = -w * z.log_softmax(-1)
        at_label = surprise.gather(-1, self.labels(y, z).unsqueeze(-1)).squeeze(-1)
        return (1 - self.label_smoothing) * at_label + self.label_smoothing * surprise.mean(-1)


def _given(y: Tensor | None) -> Tensor:
    if y is None:
        raise ValueError("class weights and ignore_index depend on the labels: pass y")
    return y


def _half_square(y: Float64[Tensor, "N S C"], z: Float64[Tensor, "N S C"]) -> Float64[Tensor, "N S"]:
    return 0.5 * (y - z).square().sum(-1)


def _binary(y: Float64[Tensor, "N S C"], z: Float64[Tensor, "N S C"]) -> Float64[Tensor, "N S"]:
    # log(1 + e^z) − y z, stable for large z of either sign
    return (z.clamp(min=0) + torch.log1p(torch.exp(-z.abs())) - y * z).sum(-1)


def _divisor(coefficients: Float64[Tensor, "N S"], normalize: str) -> float:
    if normalize not in ("examples", "terms"):
        raise ValueError(f"normalize={normalize!r} is neither 'examples' nor 'terms'")
    return float(coefficients.shape[0]) if normalize == "examples" else coefficients.sum().item()


# --- matrices of a likelihood -----------------------------------------------------------------------------


def fisher(
    model: nn.Module, x: Inputs, y: Tensor | None = None, *, normalize: str = "examples", **options: Any
) -> Float64[Tensor, "d d"]:
    """The exact Fisher matrix, also the generalized Gauss-Newton matrix of the unsmoothed loss.

    F = 1/N Σ_n Σ_s m_ns w_{y_ns} J_nsᵀ H_ns J_ns with H = diag(p) − ppᵀ (categorical), I (gaussian) or
    diag(q(1−q)) (bernoulli). Labels matter through m and w alone; label smoothing does not matter.
    """
    likelihood = _Likelihood(**options)
    f, theta = _function(model, x)
    z = likelihood.arrange(f(theta)).detach()
    J = _derivative(lambda theta: likelihood.arrange(f(theta)), theta)
    c = likelihood.coefficients(y, z)
    HJ = c[..., None, None] * (likelihood.output_fisher(z) @ J)
    return torch.einsum("nsci,nscj->ij", J, HJ) / _divisor(c, normalize)


def gradients(model: nn.Module, x: Inputs, y: Tensor, **options: Any) -> Float64[Tensor, "N d"]:
    """g_n = ∂ℓ_n/∂θ with ℓ_n = Σ_s m_ns w_{y_ns} (−log p(y_ns)), smoothed if asked: not divided by N."""
    losses, theta = _losses(model, x, y, _Likelihood(**options))
    return _derivative(losses, theta)


def empirical_fisher(
    model: nn.Module, x: Inputs, y: Tensor, *, normalize: str = "examples", **options: Any
) -> Float64[Tensor, "d d"]:
    """1/N Σ_n g_n g_nᵀ, with the gradients at the data's own labels."""
    g = gradients(model, x, y, **options)
    return g.T @ g / _normalizer(model, x, y, normalize, options)


def loss_hessian(
    model: nn.Module, x: Inputs, y: Tensor, *, normalize: str = "examples", **options: Any
) -> Float64[Tensor, "d d"]:
    """∂²/∂θ² of 1/N Σ_n ℓ_n."""
    losses, theta = _losses(model, x, y, _Likelihood(**options))
    return _hessian(lambda theta: losses(theta).sum(), theta) / _normalizer(model, x, y, normalize, options)


def _losses(
    model: nn.Module, x: Inputs, y: Tensor, likelihood: _Likelihood
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """θ ↦ (ℓ_1, …, ℓ_N), and θ."""
    f, theta = _function(model, x)
    return lambda theta: likelihood.losses(y, likelihood.arrange(f(theta))), theta


def _normalizer(model: nn.Module, x: Inputs, y: Tensor, normalize: str, options: Mapping[str, Any]) -> float:
    likelihood = _Likelihood(**options)
    return _divisor(likelihood.coefficients(y, likelihood.arrange(outputs(model, x))), normalize)


# --- matrices of given losses and cotangents --------------------------------------------------------------


def hessian(model: nn.Module, x: Inputs, y: Tensor, loss: Loss) -> Float64[Tensor, "d d"]:
    """H = ∂²/∂θ² loss(f(x; θ), y) of a scalar loss, whatever its reduction."""
    f, theta = _function(model, x)
    y = _double(y)
    return _hessian(lambda theta: loss(f(theta), y), theta)


def gradient_moment(
    model: nn.Module, x: Inputs, y: Tensor, loss: Loss, centered: bool = False, examples: int | None = None
) -> Float64[Tensor, "d d"]:
    """1/N Σ_n g_n g_nᵀ (minus ḡ ḡᵀ if centered) with g_n = ∂/∂θ loss(f[n:n+1], y[n:n+1]).

    With ``examples`` the first axis of f and y is N·T, example-major, and an example is its T rows.
    """
    f, theta = _function(model, x)
    y = _double(y)
    rows = y.shape[0] // (examples or y.shape[0])

    def losses(theta: Tensor) -> Tensor:
        pairs = zip(f(theta).split(rows), y.split(rows), strict=True)
        return torch.stack([loss(f_n, y_n) for f_n, y_n in pairs])

    g = _derivative(losses, theta)
    g = g - g.mean(0) if centered else g
    return g.T @ g / g.shape[0]


def fisher_from_labels(
    model: nn.Module, x: Inputs, cotangents: Float[Tensor, "V *out"], examples: int | None = None
) -> Float64[Tensor, "d d"]:
    """1/N Σ_v Σ_n (J_nᵀ v_vn)(J_nᵀ v_vn)ᵀ for given output gradients, such as those of sampled labels."""
    J = jacobian(model, x)
    N = examples or J.shape[0]
    J = J.reshape(N, -1, J.shape[-1])
    v = cotangents.double().reshape(len(cotangents), N, -1)
    g = torch.einsum("nki,vnk->vni", J, v)
    return torch.einsum("vni,vnj->ij", g, g) / N


def kronecker_factors(
    inputs: Sequence | Tensor, outgrads: Sequence | Tensor
) -> tuple[Float64[Tensor, "I I"], Float64[Tensor, "O O"]]:
    """A = mean over n and s of a_ns a_nsᵀ and G = 1/N Σ_v Σ_n Σ_s g_vns g_vnsᵀ, by loops.

    Args:
        inputs: ``inputs[n][s]`` is the vector a layer is given for example n at position s.
        outgrads: ``outgrads[v][n][s]`` is the v-th gradient at its output.
    """
    A: Any = 0.0
    positions = 0
    for example in inputs:
        for a in example:
            A = A + torch.outer(a.double(), a.double())
            positions += 1
    G: Any = 0.0
    for vector in outgrads:
        for example in vector:
            for g in example:
                G = G + torch.outer(g.double(), g.double())
    return A / positions, G / len(inputs)
