"""How far a network is from where it began: signs of its ReLU units, its tangent kernel, its last representation.

All are 1 at the start, and stay near 1 where training is lazy. They are measured on a few examples that stay the same,
with the model in eval mode.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.modes import evaluating
from layerwise.kernel.alignment import alignment
from layerwise.kernel.kernel import Kernel
from layerwise.kernel.ntk import ntk
from layerwise.regimes.linearized import Linearized

RELU = ("relu", "relu_", "relu6")
CLAMP = ("clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "clip_")


def sign_similarity(model: nn.Module, x: Any, start: "nn.Module | Sequence[Tensor] | None" = None) -> float:
    """The part of ReLU units, times examples, that are active if they were so at the start, and inactive if not.

    >>> import torch, layerwise as lw
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> x = torch.randn(10, 4)
    >>> start = lw.regimes.relu_signs(model, x)
    >>> lw.regimes.sign_similarity(model, x, start)
    1.0

    Args:
        model: a model with ReLU units, as modules or as functions (``torch.relu``, ``clamp(min=0)``); or one that
            `lw.linearized` returned.
        x: examples: a tensor, a tuple (``model(*x)``), a mapping (``model(**x)``), or a list of such batches.
        start: what `relu_signs` returned at the start, or a model as it was then; by default that of `lw.linearized`.
    """
    now, before = _both(model, start)
    signs = relu_signs(now, x)
    if isinstance(before, nn.Module):
        before = relu_signs(before, x)
    if [s.shape for s in signs] != [s.shape for s in before]:
        given = f"ReLU units of shapes {_shapes(signs)}, and {_shapes(before)} at the start"
        raise InputError(describe(given, "the same units on the same examples", "use one model and one x"))
    same = sum(int((a == b).sum()) for a, b in zip(signs, before, strict=True))
    return same / sum(s.numel() for s in signs)


def relu_signs(model: nn.Module, x: Any) -> list[Bool[Tensor, "N *units"]]:
    """Which ReLU units are active on which examples, call by call in the order of the model; 0 is inactive."""
    _check(model)
    seen = _Seen()
    with looked_at(model), seen:
        for batch in batches(x):
            seen.call = 0
            _apply(model, batch)
    if not seen.active:
        given = "a model without ReLU units"
        raise InputError(describe(given, "torch.relu, nn.ReLU or clamp(min=0)", "signs are of ReLU networks alone"))
    return [torch.cat(parts) for parts in seen.active.values()]


def kernel_alignment(model: nn.Module, x: Any, start: "nn.Module | Kernel | Tensor | None" = None) -> float:
    """``⟨K, K₀⟩ / (‖K‖ ‖K₀‖)`` of the tangent kernels of all outputs, now and at the start; not centred.

    >>> import torch, layerwise as lw
    >>> net = lw.linearized(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)), 10)
    >>> round(lw.regimes.kernel_alignment(net, torch.randn(10, 4)), 6)
    1.0

    Args:
        model: any model; or one that `lw.linearized` returned.
        x: examples, as for `lw.ntk`.
        start: a kernel, its matrix, or a model as it was at the start; by default that of `lw.linearized`.
    """
    now, before = _both(model, start)
    matrix = _kernel(now, x)
    return _in_unit(alignment(matrix, _kernel(before, x) if isinstance(before, nn.Module) else before))


def representation_alignment(model: nn.Module, x: Any, start: "nn.Module | Tensor | None" = None) -> float:
    """The same of ``φ φᵀ``, examples by examples, where φ is the input of the last linear layer; not centred.

    >>> import torch, layerwise as lw
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> x = torch.randn(10, 4)
    >>> round(lw.regimes.representation_alignment(model, x, lw.regimes.representation(model, x)), 6)
    1.0

    Args:
        model: a model that ends with a linear layer, module or function; or one that `lw.linearized` returned.
        x: examples, as for `sign_similarity`.
        start: what `representation` returned at the start, or a model as it was then.
    """
    now, before = _both(model, start)
    phi, phi0 = (representation(m, x).double() if isinstance(m, nn.Module) else m.double() for m in (now, before))
    if len(phi) != len(phi0):
        given = f"representations of {len(phi)} examples, and {len(phi0)} at the start"
        raise InputError(describe(given, "the same examples", "use one x"))
    return _in_unit(alignment(phi @ phi.mT, phi0 @ phi0.mT))


def representation(model: nn.Module, x: Any) -> Float[Tensor, "N features"]:
    """The input of the last linear layer, one row an example."""
    _check(model)
    found = []
    with looked_at(model):
        for batch in batches(x):
            with _LastLinear() as last:
                _apply(model, batch)
            if last.input is None:
                given = "a model without a linear layer"
                raise InputError(
                    describe(
                        given,
                        "nn.Linear or functional.linear",
                        "representations are the inputs of the last linear layer",
                    )
                )
            found.append(last.input.detach().flatten(1))
    return torch.cat(found)


# --- what is seen of a forward pass --------------------------------------------------------------------------


class _Seen(TorchFunctionMode):
    """Which units each call of a ReLU leaves above zero."""

    def __init__(self) -> None:
        super().__init__()
        self.call = 0
        self.active: dict[int, list[Tensor]] = {}

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_relu(func, args, kwargs or {}):
            self.active.setdefault(self.call, []).append((result > 0).detach())
            self.call += 1
        return result


def is_relu(func: Callable, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether a call of torch is ``max(x, 0)``."""
    name = getattr(func, "__name__", "")
    if name in CLAMP:
        least = named.get("min", args[1] if len(args) > 1 else None)
        most = named.get("max", args[2] if len(args) > 2 else None)
        return most is None and isinstance(least, int | float) and least == 0
    return name in RELU


class _LastLinear(TorchFunctionMode):
    """The input of the last call of a linear layer."""

    input: Tensor | None = None

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            self.input = args[0] if args else (kwargs or {})["input"]
        return func(*args, **(kwargs or {}))


@contextmanager
def looked_at(model: nn.Module) -> Iterator[None]:
    """In eval mode, without a graph; afterwards every module is in the mode it was in."""
    with evaluating(model), torch.no_grad():
        yield


def batches(x: Any) -> Sequence[Any]:
    """A list is of batches; anything else is one."""
    return x if isinstance(x, list) else [x]


def _apply(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _kernel(model: nn.Module, x: Any) -> Tensor:
    _check(model)
    with looked_at(model), torch.enable_grad():
        return ntk(model, x, progress=False).matrix()


def _both(model: Any, start: Any) -> tuple[nn.Module, Any]:
    """The model that is measured, and what it is compared with."""
    if isinstance(start, Linearized):
        start = start.initial_model()
    if not isinstance(model, Linearized):
        if start is None:
            do = "pass start=, a copy of the model or what was recorded then, or a model of lw.linearized"
            raise InputError(describe("no start", "the model as it was at the start", do))
        return model, start
    # The features of the linear limit are those of the start, wherever its weights are.
    initial = model.initial_model()
    return initial if math.isinf(model.alpha) else model.model, initial if start is None else start


def _check(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(describe(f"a {type(model).__name__} as model", "a torch module", "pass the module itself"))


def _in_unit(cosine: Tensor) -> float:
    return min(float(cosine), 1.0)


def _shapes(signs: Sequence[Tensor]) -> str:
    return ", ".join(str(tuple(s.shape)) for s in signs)
