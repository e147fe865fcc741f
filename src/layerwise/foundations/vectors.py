"""`ParamVector`: a named dictionary of tensors that behaves as a vector.

The flat order is that of ``model.named_parameters()``, each tensor row-major; only parameters with
``requires_grad`` take part.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown
from layerwise.foundations.types import trainable as trainable
from layerwise.foundations.types import unwrap as unwrap


class ParamVector:
    """A vector of parameter space, kept as one tensor for each parameter name.

    >>> v = ParamVector({"w": torch.ones(2, 2), "b": torch.zeros(2)})
    >>> float((2 * v) @ v), float(v.norm()), v.flat().shape
    (8.0, 2.0, torch.Size([6]))
    """

    __slots__ = ("_tensors", "standard_error")
    __array_ufunc__ = None  # let numpy scalars defer to __rmul__

    def __init__(self, tensors: Mapping[str, Tensor], standard_error: "ParamVector | None" = None) -> None:
        self._tensors = dict(tensors)
        self.standard_error = standard_error
        """Set where the entries are stochastic estimates."""

    @classmethod
    def of(cls, model: nn.Module) -> "ParamVector":
        """The parameters of a model, detached (not copied)."""
        return cls({name: p.detach() for name, p in trainable(model).items()})

    @classmethod
    def grad(cls, model: nn.Module) -> "ParamVector":
        """The gradients now stored in ``.grad``, zero for parameters that have none.

        >>> model = nn.Linear(2, 1)
        >>> ParamVector.grad(model)
        Traceback (most recent call last):
        layerwise.foundations.errors.InputError: Got a model without gradients. Expected .grad as a backward leaves \
it. Call loss.backward() first, and opt.zero_grad() after.
        """
        if all(p.grad is None for p in trainable(model).values()):
            raise InputError(
                describe(
                    "a model without gradients",
                    ".grad as a backward leaves it",
                    "call loss.backward() first, and opt.zero_grad() after",
                )
            )
        return cls(
            {name: torch.zeros_like(p) if p.grad is None else p.grad.detach() for name, p in trainable(model).items()}
        )

    @classmethod
    def zeros(cls, model: nn.Module) -> "ParamVector":
        """The zero vector."""
        return cls({name: torch.zeros_like(p) for name, p in trainable(model).items()})

    @classmethod
    def randn(cls, model: nn.Module, generator: torch.Generator | int | None = None) -> "ParamVector":
        """Standard normal entries. `generator` may be a seed; None draws from torch's global generator."""
        if isinstance(generator, int):
            generator = torch.Generator().manual_seed(generator)
        drawn = {}
        for name, p in trainable(model).items():
            device = p.device if generator is None else generator.device
            z = torch.randn(p.shape, generator=generator, device=device, dtype=p.dtype)
            drawn[name] = z.to(p.device)
        return cls(drawn)

    @classmethod
    def from_flat(cls, flat: Tensor, like: "ParamVector | nn.Module") -> "ParamVector":
        """Cut a flat vector into tensors shaped as those of `like`."""
        shapes = {k: v.shape for k, v in (trainable(like) if isinstance(like, nn.Module) else like).items()}
        sizes = [shape.numel() for shape in shapes.values()]
        if flat.shape != (sum(sizes),):
            raise InputError(
                describe(f"a tensor of shape {tuple(flat.shape)}", f"shape ({sum(sizes)},)", "pass a flat vector")
            )
        pieces = flat.split(sizes)
        return cls({name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)})

    def dict(self) -> dict[str, Tensor]:
        """The tensors by parameter name."""
        return dict(self._tensors)

    def flat(self) -> Tensor:
        """All entries in one vector, in the order of the names."""
        if not self._tensors:
            return torch.empty(0)
        return torch.cat([t.reshape(-1) for t in self._tensors.values()])

    def numel(self) -> int:
        """Number of entries."""
        return sum(t.numel() for t in self._tensors.values())

    def norm(self) -> Tensor:
        """Euclidean norm."""
        if not self._tensors:
            return torch.zeros(())
        # Squares in float64: those of large float32 entries are infinite.
        squares = [torch.linalg.vector_norm(t, dtype=torch.float64).square() for t in self._tensors.values()]
        dtype = reduce(torch.promote_types, (t.dtype for t in self._tensors.values()))
        return torch.stack(squares).sum().sqrt().to(dtype)

    def restrict(self, names: "Mapping[str, Any] | list[str] | tuple[str, ...]") -> "ParamVector":
        """The entries of these parameters alone."""
        return ParamVector({name: self[name] for name in names})

    def to(self, *args: Any, **kwargs: Any) -> "ParamVector":
        """Another device or dtype, as ``Tensor.to``."""
        return ParamVector({k: t.to(*args, **kwargs) for k, t in self._tensors.items()})

    def clone(self) -> "ParamVector":
        """A copy that shares no memory."""
        return ParamVector({k: t.clone() for k, t in self._tensors.items()})

    @torch.no_grad()
    def add_to(self, model: nn.Module, scale: int | float = 1.0) -> None:
        """``θ ← θ + scale · v``, in place."""
        parameters = trainable(model)
        for name in self._tensors:
            if name not in parameters:
                raise NameLookupError(unknown("trainable parameter", name, parameters, where="of the model"))
        for name, t in self._tensors.items():
            parameters[name].add_(t.to(parameters[name]), alpha=scale)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise NameLookupError(unknown("parameter", name, self._tensors, where="of this vector"))
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def keys(self):
        """Parameter names."""
        return self._tensors.keys()

    def values(self):
        """Tensors."""
        return self._tensors.values()

    def items(self):
        """Pairs of name and tensor."""
        return self._tensors.items()

    def _zip(self, other: "ParamVector", op: Callable[[Tensor, Tensor], Tensor]) -> "ParamVector":
        if self._tensors.keys() != other._tensors.keys():
            odd = sorted(self._tensors.keys() ^ other._tensors.keys())
            raise InputError(
                describe(
                    f"vectors whose parameters differ in {', '.join(odd[:5])}",
                    "the same parameter names on both sides",
                    "use v.restrict(names)",
                )
            )
        return ParamVector({k: op(t, other._tensors[k]) for k, t in self._tensors.items()})

    def _map(self, op: Callable[[Tensor], Tensor]) -> "ParamVector":
        return ParamVector({k: op(t) for k, t in self._tensors.items()})

    def __add__(self, other: "ParamVector") -> "ParamVector":
        return self._zip(other, torch.add)

    def __sub__(self, other: "ParamVector") -> "ParamVector":
        return self._zip(other, torch.sub)

    def __mul__(self, other: "int | float | Tensor | ParamVector") -> "ParamVector":
        if isinstance(other, ParamVector):
            return self._zip(other, torch.mul)
        return self._map(lambda t: t * other)

    __rmul__ = __mul__

    def __truediv__(self, other: "int | float | Tensor | ParamVector") -> "ParamVector":
        if isinstance(other, ParamVector):
            return self._zip(other, torch.div)
        return self._map(lambda t: t / other)

    def __neg__(self) -> "ParamVector":
        return self._map(torch.neg)

    def __matmul__(self, other: Any) -> Tensor:
        if not isinstance(other, ParamVector):
            return NotImplemented
        if self._tensors.keys() != other._tensors.keys():
            self._zip(other, torch.mul)  # raises with the names that differ
        products = [torch.sum(t * other._tensors[k]) for k, t in self._tensors.items()]
        return torch.stack(products).sum() if products else torch.zeros(())

    def __repr__(self) -> str:
        rows = ", ".join(f"{k}: {tuple(t.shape)}" for k, t in list(self._tensors.items())[:8])
        more = ", …" if len(self._tensors) > 8 else ""
        return f"ParamVector({self.numel()} entries; {rows}{more})"
