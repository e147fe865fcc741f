"""The standard form of one layer on some examples, and what follows from it for all layer types at once.

    y[n, s, k] = W[k] a[n, s, k],   a : [N, S, K, I],   g : [V, N, S, K, O]

`Standard` has inputs and gradients; `Gradients` has per-example gradients alone (a parameter without a rule).
Both answer the same questions, so nothing above needs to know which it holds.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.types import HALF
from layerwise.layers.io.one_hot import OneHot


class Chunk(ABC):
    """Some examples of one layer."""

    @abstractmethod
    def per_example_grads(self) -> Float[Tensor, "V N K O I"]:
        """``Σ_s g aᵀ``, one matrix a cotangent and example."""

    def grad(self) -> Float[Tensor, "V K O I"]:
        """Summed over examples."""
        return self.per_example_grads().sum(1)

    def squared_sum(self) -> Float[Tensor, "K O I"]:
        """``Σ_{v,n} (Σ_s g a)²``: the diagonal of the exact block."""
        return self.per_example_grads().square().sum((0, 1))

    def squared_norms(self) -> Float[Tensor, "V N"]:
        """``‖Σ_s g aᵀ‖²`` of every cotangent and example."""
        return self.per_example_grads().square().sum((2, 3, 4))

    def bias_cross_sum(self) -> Float[Tensor, "K O I"]:
        """``Σ_{v,n} (Σ_s g a) (Σ_s g)``: the bias's row of the exact block (its last column belongs to itself)."""
        rows = self.per_example_grads()
        return (rows * rows[..., -1:]).sum((0, 1))

    def outer_sum(self) -> Float[Tensor, "D D"]:
        """``Σ_{v,n} vec(Σ_s g aᵀ) vec(Σ_s g aᵀ)ᵀ``: the exact block, row-major."""
        rows = self.per_example_grads().flatten(0, 1).flatten(1)
        return rows.mT @ rows

    def group_outer_sum(self) -> Float[Tensor, "K P P"]:
        """The exact block of each group, P = O·I."""
        rows = self.per_example_grads().flatten(0, 1).flatten(2)  # M K P
        if rows.shape[-1] <= 2:
            return torch.einsum("mkp,mkq->mkpq", rows, rows).sum(0)
        by_group = rows.movedim(1, 0)
        return by_group.mT @ by_group


@dataclass(frozen=True)
class Gradients(Chunk):
    """Per-example gradients, computed elsewhere."""

    rows: Float[Tensor, "V N K O I"]

    def per_example_grads(self) -> Float[Tensor, "V N K O I"]:
        """As given."""
        return self.rows


@dataclass(frozen=True)
class Standard(Chunk):
    """Inputs (bias column included) and output gradients."""

    a: Float[Tensor, "N S K I"] | OneHot
    g: Float[Tensor, "V N S K O"]

    def per_example_grads(self) -> Float[Tensor, "V N K O I"]:
        """``einsum("vnsko,nski->vnkoi", g, a)``."""
        if not isinstance(self.a, OneHot):
            # Features of a norm layer have no matrix product in them: on a CPU, small ones take longer than their sums.
            if self.g.shape[-1] == 1 and self.a.shape[2] > 1 and self.g.device.type == "cpu":
                return torch.stack([(g * self.a).sum(1) for g in self.g]).unsqueeze(-2)
            return torch.einsum("vnsko,nski->vnkoi", self.g, self.a)
        v, n = self.g.shape[:2]
        grads = self.g.new_zeros(v, n, self.a.size + 1, self.g.shape[-1])
        index = (self.a.index.reshape(n, -1) + 1).view(1, n, -1, 1)
        rows = self.g.flatten(2, 3)
        grads.scatter_add_(2, index.expand_as(rows), rows)
        return grads[:, :, 1:].mT.unsqueeze(2)

    def grad(self) -> Float[Tensor, "V K O I"]:
        """``einsum("vnsko,nski->vkoi", g, a)``."""
        if isinstance(self.a, OneHot):
            return torch.stack([self.a.add_rows(g.flatten(0, -2)) for g in self.g]).unsqueeze(1)
        return torch.einsum("vnsko,nski->vkoi", self.g, self.a)

    def grad_times(
        self, q: Float[Tensor, "K I"], mixture: Float[Tensor, "V"]
    ) -> tuple[Float[Tensor, "K O"], Float[Tensor, ""]]:
        """``Σ_v m_v grad_v q`` without the gradients themselves, and the norm of its terms."""
        g = self.g[0] * mixture[0] if len(mixture) == 1 else torch.tensordot(mixture, self.g, 1)
        along = self.a.times(q) if isinstance(self.a, OneHot) else torch.einsum("nski,ki->nsk", self.a, q)
        return torch.einsum("nsko,nsk->ko", g, along), (g * along.unsqueeze(-1)).norm()

    def squared_sum(self) -> Float[Tensor, "K O I"]:
        """Without per-example gradients where each example has one position, or inputs are indices."""
        if isinstance(self.a, OneHot):
            token, pair = self.a.example_tokens()
            rows = self.g.flatten(1, -2)  # V M O
            sums = rows.new_zeros(rows.shape[0], token.numel(), rows.shape[-1]).index_add_(1, pair, rows)
            total = OneHot(token, self.a.size).add_rows(sums.square().sum(0))
            return total.unsqueeze(0)
        if self.a.shape[1] == 1:
            return torch.einsum("nko,nki->koi", self.g[:, :, 0].square().sum(0), self.a[:, 0].square())
        return super().squared_sum()

    def squared_norms(self) -> Float[Tensor, "V N"]:
        """Through ``Σ_st (a·a)(g·g)`` where that is cheaper than per-example gradients."""
        if isinstance(self.a, OneHot):
            index = self.a.index.reshape(self.a.index.shape[0], -1)
            same = (index.unsqueeze(1) == index.unsqueeze(2)) & (index >= 0).unsqueeze(1)
            A = same.to(self.g.dtype).unsqueeze(1)
        else:
            (v, _, s, _, o), i = self.g.shape, self.a.shape[-1]
            if s * (i / v + o) > o * i:
                return super().squared_norms()
            a = self.a.transpose(1, 2)  # N K S I
            A = a @ a.mT
        by_group = (row.transpose(1, 2) for row in self.g)
        return torch.stack([(g @ g.mT).mul_(A).sum((1, 2, 3)) for g in by_group])

    def bias_cross_sum(self) -> Float[Tensor, "K O I"]:
        """Without per-example gradients where each example has one position."""
        if not isinstance(self.a, OneHot) and self.a.shape[1] == 1:
            return torch.einsum("nko,nki->koi", self.g[:, :, 0].square().sum(0), self.a[:, 0])
        return super().bias_cross_sum()

    def rotated_squared_sum(
        self, U_A: Float[Tensor, "K I J"] | None, U_G: Float[Tensor, "K O P"]
    ) -> Float[Tensor, "K P J"]:
        """``Σ_{v,n} (U_Gᵀ (Σ_s g aᵀ) U_A)²``: the diagonal of the exact block in a Kronecker basis.

        Rotating a and g costs S (I² + O²) an example, rotating the gradient O I (O + I): the cheaper is taken.
        `U_A` None stands for the identity. Gradients of half precision are multiplied in bfloat16 and their squares
        added in float32: the errors of single products average out over examples.
        """
        if self.g.dtype in HALF:
            return self._rotated_squares_in_bfloat16(U_A, U_G)
        s, o = self.g.shape[2], self.g.shape[-1]
        i = self.a.shape[-1]
        if isinstance(self.a, OneHot) or U_A is None or s * (i * i + o * o) <= o * i * (o + i):
            a = self.a if isinstance(self.a, OneHot) or U_A is None else torch.einsum("nski,kij->nskj", self.a, U_A)
            return Standard(a, torch.einsum("vnsko,kop->vnskp", self.g, U_G)).squared_sum()
        grads = self.per_example_grads()
        return torch.einsum("kop,vnkoi,kij->vnkpj", U_G, grads, U_A).square().sum((0, 1))

    def _rotated_squares_in_bfloat16(self, U_A: Tensor | None, U_G: Tensor) -> Float[Tensor, "K O I"]:
        """`rotated_squared_sum` with bfloat16 operands, whose range is that of float32.

        A basis may be wider than a and g, which zeros then continue: tensor cores want widths of 8 or more.
        """
        g, U_G = _widened(self.g.bfloat16(), U_G.shape[-2]), U_G.bfloat16()
        by_group = g.permute(0, 1, 3, 2, 4)  # V N K S O
        if isinstance(self.a, OneHot):
            return Standard(self.a, (by_group @ U_G).transpose(2, 3).float()).squared_sum()
        U = None if U_A is None else U_A.bfloat16()
        a = self.a.bfloat16().transpose(1, 2)  # N K S I
        a = a if U is None else _widened(a, U.shape[-2])
        (s, o), i = (g.shape[2], g.shape[-1]), a.shape[-1]
        first = U is None or s * (i * i + o * o) <= o * i * (o + i)
        if first:
            by_group, a = by_group @ U_G, a if U is None else a @ U
            if s == 1:
                return Standard(a.transpose(1, 2).float(), by_group.transpose(2, 3).float()).squared_sum()
        grads = by_group.mT @ a
        if not first:
            assert U is not None
            grads = U_G.mT @ grads @ U
        # a norm adds squares up as it reads them: nothing of the size of all gradients is made in float32
        return torch.linalg.vector_norm(grads, dim=(0, 1), dtype=torch.float32).square()


def _widened(X: Tensor, width: int) -> Tensor:
    return X if X.shape[-1] == width else torch.nn.functional.pad(X, (0, width - X.shape[-1]))
