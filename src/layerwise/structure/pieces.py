"""Rows of a layer's Jacobian, ``H = 1/N Σ_n Σ_v r_nv r_nvᵀ`` with ``r_nv = Σ_s g_vns ⊗ a_ns``, and products with them.

A row is never written out where it is a single outer product: ``r · vec X = gᵀ X a`` costs two thin products. Rows of
layers whose weight is shared by many positions (the pixels of a convolution) are written out where there are fewer
cotangents than positions, since that is both smaller and faster.

A block of b columns is ``X [K, O, I, b]``; coefficients of rows are ``C [N, V, b]``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from layerwise.layers.io.one_hot import OneHot
from layerwise.layers.io.standard import Chunk, Standard

Product = Callable[[Tensor, Tensor], Tensor]
SCRATCH = 256 * 2**20
"""Bytes that products with one group of examples may take."""
OUTER = 2**25
"""Entries of rows that are written out at a time."""


class Piece(ABC):
    """The rows of some examples."""

    examples: int
    vectors: int

    @abstractmethod
    def push(self, X: Float[Tensor, "K O I b"], multiply: Product = torch.matmul) -> Float[Tensor, "N V b"]:
        """``r · vec X`` for every row."""

    @abstractmethod
    def pull(self, C: Float[Tensor, "N V b"], multiply: Product = torch.matmul) -> Float[Tensor, "K O I b"]:
        """``Σ C r``."""

    @abstractmethod
    def square(self) -> Float[Tensor, ""]:
        """``Σ ‖r‖²``."""

    @abstractmethod
    def written(self) -> Float[Tensor, "M D"]:
        """The rows themselves."""

    def add_outer_(self, total: Float[Tensor, "D D"]) -> None:
        """Add ``Σ r rᵀ`` in the precision of the total."""
        size = max(1, OUTER // (total.shape[0] * self.vectors))
        for start in range(0, self.examples, size):
            R = self.narrow(start, min(start + size, self.examples)).written().to(total.dtype)
            total.addmm_(R.mT, R)

    @abstractmethod
    def narrow(self, start: int, stop: int) -> "Piece":
        """Some examples."""

    @abstractmethod
    def bytes(self) -> int:
        """What is stored."""

    @abstractmethod
    def scratch(self, columns: int) -> int:
        """Bytes that a product with so many columns takes, an example."""

    def times(self, X: Float[Tensor, "K O I b"], multiply: Product = torch.matmul) -> Float[Tensor, "K O I b"]:
        """``Σ r rᵀ vec X``, a few examples at a time."""
        size = int(max(1, min(self.examples, SCRATCH // max(self.scratch(X.shape[-1]), 1))))
        if size >= self.examples:
            return self.pull(self.push(X, multiply), multiply)
        total = torch.zeros_like(X)
        for start in range(0, self.examples, size):
            part = self.narrow(start, min(start + size, self.examples))
            total += part.pull(part.push(X, multiply), multiply)
        return total


@dataclass(frozen=True)
class Factored(Piece):
    """Inputs and output gradients."""

    a: Float[Tensor, "N S K I"] | OneHot
    g: Float[Tensor, "N V P"]
    """P = S·K·O, examples first: one small matrix an example."""
    shape: tuple[int, int, int]

    @property
    def examples(self) -> int:  # type: ignore[override]
        """N."""
        return self.g.shape[0]

    @property
    def vectors(self) -> int:  # type: ignore[override]
        """V."""
        return self.g.shape[1]

    @property
    def positions(self) -> int:
        """S."""
        return self.a.shape[1]

    def push(self, X: Float[Tensor, "K O I b"], multiply: Product = torch.matmul) -> Float[Tensor, "N V b"]:
        """``Σ_s gᵀ X a``."""
        return self.g @ self._outputs(X, multiply)

    def pull(self, C: Float[Tensor, "N V b"], multiply: Product = torch.matmul) -> Float[Tensor, "K O I b"]:
        """``Σ_n Σ_s (Σ_v C g) aᵀ``."""
        k, o, i = self.shape
        n, b = self.examples, C.shape[-1]
        D = (self.g.mT @ C).reshape(n * self.positions, k, o * b)
        if isinstance(self.a, OneHot):
            return self.a.add_rows(D[:, 0]).reshape(k, o, b, i).movedim(-1, -2)
        a = self.a.reshape(-1, k, i)
        found = multiply(a[:, 0].mT, D[:, 0]) if k == 1 else a.permute(1, 2, 0) @ D.transpose(0, 1)
        return found.reshape(k, i, o, b).transpose(1, 2)

    def _outputs(self, X: Float[Tensor, "K O I b"], multiply: Product) -> Float[Tensor, "N P b"]:
        """``X a`` at every position: what the layer's output would move by."""
        k, o, i = self.shape
        b = X.shape[-1]
        W = X.transpose(1, 2).reshape(k, i, o * b)
        if isinstance(self.a, OneHot):
            table = torch.nn.functional.pad(W[0], (0, 0, 1, 0))
            return table[self.a.index + 1].reshape(self.examples, -1, b)
        a = self.a.reshape(-1, k, i)
        Z = multiply(a[:, 0], W[0]) if k == 1 else (a.transpose(0, 1) @ W).transpose(0, 1)
        return Z.reshape(self.examples, -1, b)

    def square(self) -> Float[Tensor, ""]:
        """Of every example ``‖g aᵀ‖²``, by the layer's own closed form."""
        return self.standard().squared_norms().double().sum()

    def standard(self) -> Standard:
        """As the sweep gave it."""
        k, o, _ = self.shape
        g = self.g.unflatten(-1, (self.positions, k, o)).movedim(1, 0)
        return Standard(self.a, g)

    def add_outer_(self, total: Float[Tensor, "D D"]) -> None:
        """Add ``Σ M_x ⊗ x xᵀ``: two symmetric matrices an example, of which half is multiplied."""
        k, o, i = self.shape
        if k > 1 or self.positions > 1 or isinstance(self.a, OneHot):
            super().add_outer_(total)
            return
        up, across = (torch.triu_indices(n, n, device=total.device) for n in (o, i))
        halves = total.new_zeros(up.shape[1], across.shape[1])
        size = max(1, OUTER // (o * o + i * i))
        for start in range(0, self.examples, size):
            g, a = self.g[start : start + size].to(total.dtype), self.a[start : start + size, 0, 0].to(total.dtype)
            M = g.mT @ g
            halves.addmm_(M[:, up[0], up[1]].mT, a[:, across[0]] * a[:, across[1]])
        outputs, inputs = (_places(n, pairs) for n, pairs in ((o, up), (i, across)))
        total.view(o, i, o, i).add_(halves[outputs][:, :, inputs].transpose(1, 2))

    def written(self) -> Float[Tensor, "M D"]:
        """Per-example gradients, examples first."""
        return self.standard().per_example_grads().transpose(0, 1).flatten(0, 1).flatten(1)

    def narrow(self, start: int, stop: int) -> "Factored":
        """Some examples."""
        a = OneHot(self.a.index[start:stop], self.a.size) if isinstance(self.a, OneHot) else self.a[start:stop]
        return Factored(a, self.g[start:stop], self.shape)

    def bytes(self) -> int:
        """Inputs and gradients."""
        a = self.a.index if isinstance(self.a, OneHot) else self.a
        return a.numel() * a.itemsize + self.g.numel() * self.g.itemsize

    def scratch(self, columns: int) -> int:
        """``X a`` and ``Σ C g``."""
        return 2 * self.g.shape[-1] * columns * self.g.itemsize


def _places(n: int, pairs: Int[Tensor, "2 p"]) -> Int[Tensor, "n n"]:
    """For every entry of a symmetric matrix, which of the pairs it is."""
    places = pairs.new_zeros(n, n)
    number = torch.arange(pairs.shape[1], device=pairs.device)
    places[pairs[0], pairs[1]] = number
    places[pairs[1], pairs[0]] = number
    return places


@dataclass(frozen=True)
class Written(Piece):
    """The rows themselves."""

    rows: Float[Tensor, "N V D"]
    shape: tuple[int, int, int]

    @property
    def examples(self) -> int:  # type: ignore[override]
        """N."""
        return self.rows.shape[0]

    @property
    def vectors(self) -> int:  # type: ignore[override]
        """V."""
        return self.rows.shape[1]

    def push(self, X: Float[Tensor, "K O I b"], multiply: Product = torch.matmul) -> Float[Tensor, "N V b"]:
        """One product."""
        return multiply(self.rows.flatten(0, 1), X.reshape(-1, X.shape[-1])).unflatten(0, self.rows.shape[:2])

    def pull(self, C: Float[Tensor, "N V b"], multiply: Product = torch.matmul) -> Float[Tensor, "K O I b"]:
        """One product."""
        return multiply(self.rows.flatten(0, 1).mT, C.flatten(0, 1)).reshape(*self.shape, -1)

    def square(self) -> Float[Tensor, ""]:
        """Sum of squares."""
        return torch.linalg.vector_norm(self.rows, dtype=torch.float64).square()

    def written(self) -> Float[Tensor, "M D"]:
        """As they are."""
        return self.rows.flatten(0, 1)

    def narrow(self, start: int, stop: int) -> "Written":
        """Some examples."""
        return Written(self.rows[start:stop], self.shape)

    def bytes(self) -> int:
        """Of the rows."""
        return self.rows.numel() * self.rows.itemsize

    def scratch(self, columns: int) -> int:
        """Coefficients."""
        return self.vectors * columns * self.rows.itemsize


def is_cheaper_written(chunk: Chunk, vectors: int) -> bool:
    """Whether rows are cheaper than their factors: fewer cotangents than positions."""
    if not isinstance(chunk, Standard):
        return True
    return not isinstance(chunk.a, OneHot) and vectors < chunk.g.shape[2]


def piece(chunk: Chunk, shape: tuple[int, int, int], dtype: torch.dtype, vectors: int) -> Piece:
    """The rows of a chunk in the cheaper of the two forms, of an example that has so many `vectors` in all."""
    if is_cheaper_written(chunk, vectors):
        return Written(chunk.per_example_grads().to(dtype).transpose(0, 1).flatten(2).contiguous(), shape)
    assert isinstance(chunk, Standard)
    a = chunk.a if isinstance(chunk.a, OneHot) else chunk.a.to(dtype).contiguous()
    return Factored(a, chunk.g.to(dtype).transpose(0, 1).flatten(2).contiguous(), shape)


def stacked(before: list[Piece], more: list[Piece]) -> list[Piece]:
    """The same examples with further cotangents; where examples were cut otherwise, as further pieces."""
    if [p.examples for p in before] != [p.examples for p in more]:
        return [*before, *more]
    found: list[Piece] = []
    for p, q in zip(before, more, strict=True):
        if isinstance(p, Factored) and isinstance(q, Factored):
            found.append(Factored(p.a, torch.cat([p.g, q.g], 1), p.shape))
        elif isinstance(p, Written) and isinstance(q, Written):
            found.append(Written(torch.cat([p.rows, q.rows], 1), p.shape))
        else:
            found += [p, q]
    return found


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one form as one, so that products are few and large."""
    found: list[list[Piece]] = []
    for p in pieces:
        if found and _alike(found[-1][0], p):
            found[-1].append(p)
        else:
            found.append([p])
    return [_join(group) for group in found]


def _alike(p: Piece, q: Piece) -> bool:
    if isinstance(p, Factored) and isinstance(q, Factored):
        return p.g.shape[1:] == q.g.shape[1:] and p.a.shape[1:] == q.a.shape[1:]
    return isinstance(p, Written) and isinstance(q, Written) and p.rows.shape[1:] == q.rows.shape[1:]


def _join(group: list[Piece]) -> Piece:
    first = group[0]
    if len(group) == 1:
        return first
    if isinstance(first, Written):
        return Written(torch.cat([p.rows for p in group if isinstance(p, Written)]), first.shape)
    assert isinstance(first, Factored)
    parts = [p for p in group if isinstance(p, Factored)]
    g = torch.cat([p.g for p in parts])
    if isinstance(first.a, OneHot):
        return Factored(
            OneHot(torch.cat([p.a.index for p in parts if isinstance(p.a, OneHot)]), first.a.size), g, first.shape
        )
    return Factored(torch.cat([p.a for p in parts if isinstance(p.a, Tensor)]), g, first.shape)
