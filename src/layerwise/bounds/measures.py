"""Measures of complexity of a trained network, other than the path's: counts, products of norms, Fisher–Rao.

They are for chains of `nn.Linear` and `nn.Conv2d` layers with activations, pooling and dropout between them; a kernel
counts as the matrix ``[out, in · height · width]``, and biases are left out of the norms. Trained parameters of any
other kind (norms, embeddings, attention), convolutions in groups and shared weights are refused. In a network with
branches the products still run over all layers, but bound nothing. Each measure is what its bound has for the norms:
without constants, logarithms and the number of examples.
"""

import math

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from layerwise.bounds.margins import margin_percentile
from layerwise.curvature.build import fisher
from layerwise.foundations.errors import InputError, UnsupportedError, describe
from layerwise.foundations.modes import evaluating
from layerwise.foundations.vectors import ParamVector, unwrap
from layerwise.kernel.ntk import ntk

POWERS = {"parameters": 0, "spectral-frobenius": 2}
"""By which power of the margin a measure's bound is divided, where that is not the first."""


def parameter_count(model: nn.Module) -> int:
    """Trained numbers.

    >>> parameter_count(nn.Linear(4, 3))
    15
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def weight_matrices(model: nn.Module) -> dict[str, Float[Tensor, "o i"]]:
    """Layers by name, as matrices of double precision; what the measures cannot see is refused."""
    model, found, seen = unwrap(model), {}, set()
    for name, module in model.named_modules(remove_duplicate=False):
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        if type(module) not in (nn.Linear, nn.Conv2d) or (isinstance(module, nn.Conv2d) and module.groups != 1):
            grouped = " in groups" if isinstance(module, nn.Conv2d) else ""
            given = f"parameters of {name or 'the model'}, a {type(module).__name__}{grouped}"
            raise UnsupportedError(
                describe(given, "nn.Linear and nn.Conv2d without groups", "leave such layers out of the comparison")
            )
        if seen & {id(p) for p in own}:
            raise UnsupportedError(
                describe(f"{name}, whose weights are shared", "layers with weights of their own", "untie them")
            )
        seen |= {id(p) for p in own}
        weight: Tensor = getattr(module, "weight")  # noqa: B009
        found[name] = weight.detach().flatten(1).double()
    if not found:
        raise InputError(describe("a model without layers", "nn.Linear or nn.Conv2d", "pass the network itself"))
    return found


def frobenius_product(model: nn.Module) -> float:
    """Π_l ‖W_l‖_F (Neyshabur et al. 2015).

    >>> layer = nn.Linear(2, 2)
    >>> _ = layer.weight.data.fill_(1.0)
    >>> frobenius_product(nn.Sequential(layer, nn.ReLU(), nn.Linear(2, 1))) > 0
    True
    """
    return math.prod(float(W.norm()) for W in weight_matrices(model).values())


def one_inf_product(model: nn.Module) -> float:
    """Π_l ‖W_l‖_{1,∞}, the largest sum of absolute weights into a unit (Bartlett and Mendelson 2002)."""
    return math.prod(float(W.abs().sum(1).max()) for W in weight_matrices(model).values())


def bartlett2017(model: nn.Module, initial: nn.Module) -> float:
    """Π_l ‖W_l‖₂ (Σ_l (‖(W_l − W⁰_l)ᵀ‖_{2,1}/‖W_l‖₂)^⅔)^(3/2), with distances from the start unit by unit.

    Bartlett, Foster and Telgarsky 2017.
    """
    pairs = _pairs(model, initial)
    terms = [float((W - W0).norm(dim=1).sum()) * s for (W, W0), s in zip(pairs, _others(pairs), strict=True)]
    return sum(t ** (2 / 3) for t in terms) ** 1.5


def spectral_frobenius(model: nn.Module, initial: nn.Module) -> float:
    """Π_l ‖W_l‖₂² Σ_l ‖W_l − W⁰_l‖_F²/‖W_l‖₂² (Neyshabur et al. 2018); a square, so its margin is squared, too."""
    pairs = _pairs(model, initial)
    return sum((float((W - W0).norm()) * s) ** 2 for (W, W0), s in zip(pairs, _others(pairs), strict=True))


def neyshabur2019(model: nn.Module, initial: nn.Module, x: Float[Tensor, "N ..."], margin: int | float = 1.0) -> float:
    """√c ‖V‖_F (‖U − U⁰‖_F ‖X‖_F + ‖U⁰X‖_F)/(γ√n) + √h of f = V relu(Ux) with h units and c outputs.

    √n times the bound of Theorem 2 of Neyshabur et al., arXiv 1805.12076, without its constants. A deeper network has
    as U all layers but the last: ‖U − U⁰‖_F becomes Σ_l ‖W_l − W⁰_l‖_F Π_{k≠l} ‖W_k‖₂, and U⁰X what the initial
    network hands to the activation before its last layer, without its bias.
    """
    *hidden, (V, _) = _pairs(model, initial)
    if not hidden:
        raise InputError(describe("a model of one layer", "two layers or more", "take another measure"))
    names = list(weight_matrices(initial))
    seen = _chain(initial, names, x)
    moved = sum(float((W - W0).norm()) * s for (W, W0), s in zip(hidden, _others(hidden), strict=True))
    start, bias = seen[names[-2]].double(), getattr(unwrap(initial).get_submodule(names[-2]), "bias", None)
    if bias is not None:
        start = start - bias.detach().double().reshape(-1, *[1] * (start.ndim - 2))
    inputs = float(x.detach().double().norm())
    lipschitz = float(V.norm()) * (moved * inputs + float(start.norm())) / len(x) ** 0.5
    return len(V) ** 0.5 * lipschitz / margin + len(hidden[-1][0]) ** 0.5


def fisher_rao(model: nn.Module, x: Tensor, y: Tensor, likelihood: str | None = None) -> float:
    """√(wᵀFw), with the Fisher matrix of the model's likelihood on the inputs (Liang et al. 2019).

    By default classes are categorical, and those of a model with one output, labelled 0 and 1 or ±1, Bernoulli's.
    """
    with evaluating(model):
        if likelihood is None:
            with torch.no_grad():
                f = model(x)
            one = f.ndim == 1 or f.shape[1:].numel() == 1
            likelihood, y = ("bernoulli", (y > 0).to(f.dtype).reshape(f.shape)) if one else ("categorical", y)
        w = ParamVector.of(model).clone()
        F = fisher(model, (x, y), likelihood, structure="implicit", estimator="exact", progress=False)
        return float((w @ (F @ w)).clamp_min(0).sqrt())


def displacement_trace(model: nn.Module, initial: nn.Module, x: Tensor) -> float:
    """‖w − w⁰‖ √Tr K at the end: the complexity of the path, if it were straight and the kernel that of the end."""
    moved = ParamVector.of(model) - ParamVector.of(initial)
    with evaluating(model):
        return float(moved.norm()) * float(ntk(model, x, progress=False).trace()) ** 0.5


def measures(
    model: nn.Module,
    initial: nn.Module,
    x: Float[Tensor, "N ..."],
    y: Shaped[Tensor, "N"],
    *,
    normalized: bool = False,
    percent: int | float = 10,
    likelihood: str | None = None,
) -> dict[str, float]:
    """All measures of this module by name.

    >>> import copy
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> initial = copy.deepcopy(model)
    >>> _ = model[0].weight.data.add_(0.1)
    >>> found = measures(model, initial, torch.randn(20, 4), torch.randint(3, (20,)))
    >>> int(found["parameters"]), found["bartlett-2017"] > 0
    (67, True)

    Args:
        model: as trained; it is left as it was.
        initial: a copy of it before training.
        x: training inputs (those of a probe will do, if it is the same for all that is compared).
        y: their labels: of classes, or ±1.
        normalized: divide by the margin's percentile, as bounds do (a square by its square, a count by nothing).
        percent: which percentile.
        likelihood: of the Fisher matrix; by default see `fisher_rao`.
    """
    with evaluating(model), torch.no_grad():
        margin = margin_percentile(model(x), y, percent) if normalized else 1.0
    if not margin > 0:
        given = f"a margin of {margin:.3g} at {percent} % of the examples"
        raise InputError(describe(given, "a positive one", "train longer, or take a larger percent"))
    found = {
        "parameters": float(parameter_count(model)),
        "frobenius": frobenius_product(model),
        "one-inf": one_inf_product(model),
        "bartlett-2017": bartlett2017(model, initial),
        "spectral-frobenius": spectral_frobenius(model, initial),
        "fisher-rao": fisher_rao(model, x, y, likelihood),
        "displacement-trace": displacement_trace(model, initial, x),
    }
    divided = {name: value / margin ** POWERS.get(name, 1) for name, value in found.items()}
    return divided | {"neyshabur-2019": neyshabur2019(model, initial, x, margin)}


def _others(pairs: list[tuple[Tensor, Tensor]]) -> list[float]:
    """For each layer, the product of the spectral norms of all others."""
    norms = [float(torch.linalg.matrix_norm(W, 2)) for W, _ in pairs]
    return [math.prod(norms[:l] + norms[l + 1 :], start=1.0) for l in range(len(norms))]


def _pairs(model: nn.Module, initial: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Layers now and before."""
    now, before = weight_matrices(model), weight_matrices(initial)
    if {k: W.shape for k, W in now.items()} != {k: W.shape for k, W in before.items()}:
        raise InputError(
            describe(
                "an initial model with other layers",
                "a copy of the model",
                "pass copy.deepcopy(model), made before training",
            )
        )
    return [(now[name], before[name]) for name in now]


def _chain(model: nn.Module, names: list[str], x: Tensor) -> dict[str, Tensor]:
    """Outputs of the layers on the inputs; layers that are not called once each, in this order, are refused."""
    model, seen, called = unwrap(model), {}, []

    def keep(name: str):
        def hook(_: nn.Module, __: tuple, out: Tensor) -> None:
            called.append(name)
            seen[name] = out.detach()

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    try:
        with evaluating(model), torch.no_grad():
            model(x)
    finally:
        for hook in hooks:
            hook.remove()
    if called != names:
        given = f"layers that are called in the order {', '.join(called)}"
        raise UnsupportedError(describe(given, f"each once, as they are listed: {', '.join(names)}", "list them so"))
    return seen
