"""A stack's parameters as lists of matrices, one a layer, as they are stored: what passes over lists read and write."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.layers.form import Part
from layerwise.layers.table import LayerSpec
from layerwise.optim.cuda.scaled import Scaled
from layerwise.optim.cuda.unscaled import unscaled
from layerwise.optim.rule import Shape

Lists = tuple[list[Tensor], list[Tensor] | None]
Owned = list[tuple[nn.Parameter, Part]]


@dataclass
class ParamLists:
    """Every layer as a weight ``[rows, columns]`` and perhaps a bias ``[rows]``, its last column.

    The groups of a layer follow one another, so that its K matrices ``[O, I]`` are one of K·O rows. A parameter that is
    stored transposed is listed as it is stored, and its stack is the transpose of what is gathered.
    """

    weights: Owned
    biases: Owned | None
    size: tuple[int, int]
    """Rows and columns of each weight."""
    groups: int
    """Of each layer."""
    transposed: bool
    _places: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    _views: Lists | None = None

    @classmethod
    def of(cls, specs: Sequence[LayerSpec], params: Mapping[str, nn.Parameter], shape: Shape) -> "ParamLists | None":
        """The lists, if all layers are made alike and can be taken as they are stored."""
        form = specs[0].form
        kinds = {(f.groups, f.outputs, f.inputs, len(f.parts), f.transposed) for f in (spec.form for spec in specs)}
        simple = form.groups == 1 or not (form.transposed or any(shape.padding))
        if len(kinds) > 1 or not simple or shape.dtype != torch.float32 or (form.transposed and form.bias is not None):
            return None
        parts = [[(params[part.name], part) for part in spec.form.parts] for spec in specs]
        rows, columns = form.groups * form.outputs, form.inputs - (len(form.parts) - 1)
        return cls(
            [owned[0] for owned in parts],
            [owned[1] for owned in parts] if len(form.parts) == 2 else None,
            (columns, rows) if form.transposed else (rows, columns),
            form.groups,
            form.transposed,
        )

    def parameters(self) -> Lists | None:
        """All parameters; the same views at every step, unless their memory was exchanged, or its order."""
        owned = [*self.weights, *(self.biases or ())]
        places = [(p.data_ptr(), p.stride()) for p, _ in owned]
        if places != self._places:
            self._places, self._views = places, self._lists([p.detach() for p, _ in owned])
        return self._views

    def gradients(self) -> Lists | None:
        """All gradients, if there are all; they are other tensors at every step."""
        found = [p.grad for p, _ in self.weights]
        if self.biases is not None:
            found += [p.grad for p, _ in self.biases]
        return self._lists(found)

    def _lists(self, tensors: Sequence[Tensor | None]) -> Lists | None:
        K, (rows, columns) = len(self.weights), self.size
        weights = _shaped(tensors[:K], self.weights, (rows, columns))
        biases = None if self.biases is None else _shaped(tensors[K:], self.biases, (rows,))
        return None if weights is None or (self.biases is not None and biases is None) else (weights, biases)

    def room(self, shape: Shape) -> Tensor:
        """An empty stack ``[K, O, I]`` that can be gathered into."""
        O, I = shape.outputs, shape.inputs
        size = (shape.groups, I, O) if self.transposed else (shape.groups, O, I)
        empty = torch.empty(size, dtype=shape.dtype, device=shape.device)
        return empty.mT if self.transposed else empty

    def matrices(self, X: Tensor) -> Tensor:
        """A stack ``[K, O, I]`` as one matrix a layer, as it is stored."""
        if self.transposed:
            return X.mT
        return X if self.groups == 1 else X.reshape(len(self.weights), -1, X.shape[-1])

    def directions(self, D: Tensor | Scaled) -> Tensor | Scaled:
        """The same of what a step subtracts."""
        if not isinstance(D, Scaled):
            X = self.matrices(D)  # a rule of someone's own may return any view
            return X if X[0].is_contiguous() or X[0].mT.is_contiguous() else X.contiguous()
        return Scaled(self.matrices(D.C), D.scales) if self.groups == 1 else self.matrices(unscaled(D))

    def laid_out(self, X: Tensor) -> Tensor:
        """The same stack in the memory's order of the parameters; as it is, where it has that."""
        return laid_out(X, self.transposed)


def laid_out(X: Float[Tensor, "K O I"], transposed: bool) -> Float[Tensor, "K O I"]:
    """The same, its matrices or their transposes each in one piece; as it is, where they are."""
    if transposed:
        return X if X.mT.is_contiguous() else X.mT.contiguous().mT
    return X.contiguous()


def _shaped(tensors: Sequence[Tensor | None], owned: Owned, size: tuple[int, ...]) -> list[Tensor] | None:
    """Parts of parameters as matrices or vectors; None where one is missing, or would have to be copied."""
    found = []
    for t, (_, part) in zip(tensors, owned, strict=True):
        if t is None or t.layout is not torch.strided:
            return None
        if part.rows is not None:
            t = t.narrow(0, part.rows[0], part.rows[1] - part.rows[0])
        if t.shape != size:
            if not t.is_contiguous():
                return None
            t = t.view(size)
        found.append(t)
    return found
