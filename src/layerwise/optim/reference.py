"""The reference backend: factors, inverse roots, eigenbases and the ends of steps in plain torch.

This is what runs on a CPU, what the `cuda` backend is tested against, and the place to read what a step computes. The
host looks at values here (whether a moment is finite, whether a decomposition succeeded); see `cuda` for how a GPU
does without.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.optim.adam import adam

from layerwise.foundations.errors import NumericalError
from layerwise.foundations.linalg import finite_matrices, gram, guarded_eigh, guarded_inverse, settled_eigh
from layerwise.optim.backend import ALL, Average, Backend, Eigenbasis, Factor, InverseRoots, Shifts, Side
from layerwise.optim.channels import times_inputs, whole_spectrum
from layerwise.optim.eigenbasis import squares_of_layer
from layerwise.optim.rule import Context, Health, Recorded, Shape, State

DEPENDENT = 64
"""Times ε, of the largest: columns of ``M U`` that others leave no more of are rounding to a good part, and stay."""


def running_weight(count: Tensor, decay: float) -> Float[Tensor, "K"]:
    """``(1−ρ)/(1−ρᵗ)``, in float64: of the t-th batch in an average without the bias of its start."""
    t = count.clamp_min(1).double()
    return (1 - decay) / (1 - decay**t) if decay > 0 else torch.ones_like(t)


def finite_moments(M: Tensor) -> Bool[Tensor, "K"]:
    """Whether each second moment (a matrix, or a diagonal) is finite.

    The diagonal tells: ``|M_ij|² ≤ M_ii M_jj``, and what is not finite in a row of X is not finite in ``(XᵀX)_ii``.
    """
    return torch.isfinite(M if M.ndim == 2 else M.diagonal(dim1=-2, dim2=-1)).all(-1)


def per_group(numbers: Tensor, X: Tensor) -> Tensor:
    """One number a group, shaped to multiply X."""
    return numbers.view(-1, *[1] * (X.ndim - 1))


# --- factors -----------------------------------------------------------------------------------------------


@dataclass
class DenseFactor(Factor):
    """Squares ``[K, d, d]``, or diagonals ``[K, d]`` where inputs are one-hot.

    Under SUA (`channels`) a square is that of the channels, which occurs `taps` times, and the bias a block of its own.
    """

    side: Side
    mean: Tensor
    count: Tensor
    taps: Tensor | None = None
    bias: Float[Tensor, "K 1"] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """P and its count, or Q and its own."""
        named = {"": self.mean, "_count": self.count, "_taps": self.taps, "_bias": self.bias}
        return {f"{self.side}{suffix}": X for suffix, X in named.items() if X is not None}

    def update_(
        self,
        new: Tensor,
        decay: float,
        context: Context,
        seen: Tensor | None = None,
        how: Literal["mean", "ema", "sum"] = "mean",
    ) -> None:
        """``mean ← mean + w (new − mean)``, ``w = (1−ρ)/(1−ρᵗ)`` at the t-th batch of a group ("mean"), or 1 − ρ."""
        finite = finite_moments(new)
        take = finite if seen is None else finite & seen
        everything = bool(take.all())
        if not everything:
            asked = finite.numel() if seen is None else seen.sum()
            if how == "mean":
                context.health.count("skipped_statistics", asked - take.sum())
        self.count += take.to(self.count.dtype)
        new = new.to(self.mean.dtype)
        if how == "sum":
            self.mean += torch.where(per_group(take, new), new, 0.0)
            return
        if not everything:  # 0 · nan would still be nan
            new = torch.where(per_group(take, new), new, self.mean)
        if how == "ema":
            self.mean.lerp_(new, 1 - decay)
            return
        weight = running_weight(self.count, decay)
        weight = weight if everything else torch.where(take, weight, 0.0)
        self.mean.lerp_(new, per_group(weight.to(self.mean.dtype), self.mean))

    def _diagonal(self, groups: slice) -> Tensor:
        M = self.mean[groups]
        return M if M.ndim == 2 else M.diagonal(dim1=-2, dim2=-1)

    def mean_eigenvalue(self, groups: slice = ALL) -> Float[Tensor, "K"]:
        """Of the whole factor: under SUA its blocks count as often as they occur."""
        mean = self._diagonal(groups).mean(-1)
        if self.taps is None:
            return mean
        weights = self.taps[groups] * self.mean.shape[-1]
        total = weights * mean
        return total / weights if self.bias is None else (total + self.bias[groups, 0]) / (weights + 1)

    def trace(self, groups: slice = ALL) -> Float[Tensor, "K"]:
        """Of what is stored."""
        return self._diagonal(groups).sum(-1)

    def dense(self, groups: slice = ALL) -> Tensor:
        """As it is."""
        return self.mean[groups]

    def product(self, X: Float[Tensor, "K O I"]) -> Float[Tensor, "K O I"]:
        """``P X``, or ``X Q``."""
        return self.mean @ X if self.side == "P" else times_inputs(X, self.mean, self.bias)


# --- inverse roots -----------------------------------------------------------------------------------------


def inverse_root(
    M: Float[Tensor, "K n n"], shift: Float[Tensor, "K"], power: float, by_eigh: bool = False
) -> Float[Tensor, "K n n"]:
    """``(M + shift I)^(−power)``: by Cholesky for a power of 1 (unless `by_eigh`), else through the eigenbasis."""
    if power == 1 and not by_eigh:
        return guarded_inverse(M, shift, name="damped factor")
    values, vectors = guarded_eigh(M, name="factor")
    floor = values.amax(-1, keepdim=True) * torch.finfo(values.dtype).eps * M.shape[-1]
    damped = torch.maximum(values + shift.unsqueeze(-1), floor.clamp_min(torch.finfo(values.dtype).tiny))
    return gram((vectors * damped.pow(-power / 2).unsqueeze(-2)).mT)  # one triangle


def guarded_root(M: Tensor, shift: Tensor, power: float, last: Tensor, health: Health, by_eigh: bool = False) -> Tensor:
    """The same for a factor or its diagonal; what cannot be decomposed keeps `last`."""
    if M.ndim == 2:
        found = (M + shift.unsqueeze(-1)).pow(-power)
        finite = torch.isfinite(found).all(1)
    else:
        try:
            found = inverse_root(M, shift, power, by_eigh)
        except NumericalError:
            return _one_by_one(M, shift, power, last, health)
        finite = torch.isfinite(found.sum((-2, -1)))  # twenty times faster than the entries themselves
        if M.device.type != "cpu" or not bool(finite.all()):  # a sum may overflow
            finite = finite_matrices(found)
    mean = M.mean(-1) if M.ndim == 2 else M.diagonal(dim1=-2, dim2=-1).mean(-1)
    known = mean > 0  # of a factor without statistics, damping alone would be inverted
    good = finite & known
    if M.device.type == "cpu" and bool(good.all()):
        return found
    health.count("fallbacks", (known & ~good).sum())
    return torch.where(per_group(good, found), found, last)


def _one_by_one(M: Tensor, shift: Tensor, power: float, last: Tensor, health: Health) -> Tensor:
    """Each group alone, so that one bad factor does not cost the others theirs."""
    found = []
    for k in range(M.shape[0]):
        try:
            found.append(inverse_root(M[k : k + 1], shift[k : k + 1], power)[0])
        except NumericalError:
            health.fallbacks += 1
            found.append(last[k])
    return torch.stack(found)


@dataclass
class DenseRoots(InverseRoots):
    """The roots themselves; under SUA that of the bias's block apart."""

    power: tuple[float, float]
    P: Tensor | None
    Q: Tensor | None
    Q_bias: Tensor | None = None
    by_eigh: bool = False

    def tensors(self) -> dict[str, Tensor]:
        """Those that there are."""
        named = {"P_root": self.P, "Q_root": self.Q, "Q_bias_root": self.Q_bias}
        return {name: X for name, X in named.items() if X is not None}

    def refresh_(
        self, P: Factor | None, Q: Factor | None, shifts: Shifts, groups: slice, context: Context,
        scale: float | None = None,
    ) -> None:  # fmt: skip
        """By Cholesky, or through an eigendecomposition."""
        mean_P = None if P is None else P.mean_eigenvalue(groups)
        mean_Q = None if Q is None else Q.mean_eigenvalue(groups)
        (left, right), (p, q) = shifts(mean_P, mean_Q), self.power
        if P is not None and self.P is not None and left is not None:
            self._renew(self.P[groups], P.dense(groups), left, p, context, scale)
        if Q is not None and self.Q is not None and right is not None:
            self._renew(self.Q[groups], Q.dense(groups), right, q, context, scale)
            if self.Q_bias is not None and Q.bias is not None:
                self._renew(self.Q_bias[groups], Q.bias[groups], right, q, context, scale)

    def _renew(
        self, root: Tensor, M: Tensor, shift: Tensor, power: float, context: Context, scale: float | None
    ) -> None:
        M = M if scale is None else scale * M
        root.copy_(guarded_root(M, shift, power, root, context.health, self.by_eigh))

    def direction(self, X: Float[Tensor, "K O I"], context: Context, shifts: Shifts) -> Float[Tensor, "K O I"]:
        """``P⁻ᵖ X Q⁻ᑫ``."""
        X = X if self.P is None else self.P @ X
        if self.Q is None:
            return X
        return X @ self.Q if self.Q.shape[-2:] == X.shape[-1:] * 2 else times_inputs(X, self.Q, self.Q_bias)


# --- eigenbases --------------------------------------------------------------------------------------------


def _columns(X: Float[Tensor, "K m n"], order: Int[Tensor, "K n"]) -> Float[Tensor, "K m n"]:
    return X.gather(-1, order.unsqueeze(-2).expand_as(X))


def _with_null_last(
    Z: Float[Tensor, "K n n"], U: Float[Tensor, "K n n"], order: Int[Tensor, "K n"], null: Bool[Tensor, "K n"]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Columns of Z, those of U in place of null ones, these last; U, the order and which are null likewise."""
    last = null.to(torch.int8).argsort(dim=-1, stable=True)
    Z = torch.where(null.unsqueeze(-2), U, Z)
    return _columns(Z, last), _columns(U, last), order.gather(-1, last), null.gather(-1, last)


def orthogonal_columns(MU: Tensor, U: Tensor, order: Tensor, host_may_sync: bool = True) -> tuple[Tensor, Tensor]:
    """Q of ``M U`` with its columns in this order, and the order itself, of which null vectors are put last.

    Where M is singular some columns of ``M U`` depend on those before, and QR makes any vectors of them: rounding. In
    their place are the columns of U. Those and the others are as independent as the others are. A column that is small
    beside the first is a null vector before any QR. Those that QR finds come after all that are large: what is left of
    them is orthogonalized again within the columns that they have spoilt.
    """
    Z, U = _columns(MU, order), _columns(U, order)
    limit = DEPENDENT * torch.finfo(Z.dtype).eps
    norms = torch.linalg.vector_norm(Z, dim=-2)
    null = norms <= limit * norms[..., :1]
    if not host_may_sync or bool(null.any()):
        Z, U, order, null = _with_null_last(Z, U, order, null)
    Q, R = torch.linalg.qr(Z)
    sizes = R.diagonal(dim1=-2, dim2=-1).abs().masked_fill(null, 0.0)
    further = ~null & (sizes <= limit * sizes.amax(-1, keepdim=True))
    if host_may_sync and not bool(further.any()):
        return Q, order
    Z, _, order, _ = _with_null_last(Z, U, order, null | further)
    good = int(further.int().argmax(-1)[further.any(-1)].min()) if host_may_sync else 0
    if 2 * good < Z.shape[-1]:
        return torch.linalg.qr(Z)[0], order
    rest = Q[..., good:]  # an exact basis of what the good columns leave, whatever it was made of
    return torch.cat([Q[..., :good], rest @ torch.linalg.qr(rest.mT @ Z[..., good:])[0]], -1), order


@dataclass
class DenseBasis(Eigenbasis):
    """Eigenvectors as columns; under SUA those of the channels' block."""

    U_P: Tensor | None
    U_Q: Tensor | None
    values_P: Tensor
    values_Q: Tensor
    bias: Float[Tensor, "K 1"] | None = None
    """Of the bias's block under SUA, which is 1 and its own basis."""
    has: tuple[bool, bool] = (True, True)
    """Whether there are P and Q: values of a side without a factor stay zero, and are not saved."""

    def tensors(self) -> dict[str, Tensor]:
        """Vectors and values of the sides that have a factor."""
        P, Q = (values if has else None for values, has in zip((self.values_P, self.values_Q), self.has, strict=True))
        named = {"U_P": self.U_P, "s_P": P, "U_Q": self.U_Q, "s_Q": Q}
        return {name: X for name, X in named.items() if X is not None}

    @property
    def trivial(self) -> bool:
        """Whether both sides have the identity."""
        return self.U_P is None and self.U_Q is None

    def _sides(self, P: Factor | None, Q: Factor | None) -> Iterator[tuple[Factor, Tensor | None, Tensor]]:
        for factor, U, values in ((P, self.U_P, self.values_P), (Q, self.U_Q, self.values_Q)):
            if factor is not None:
                yield factor, U, values

    def refresh_(
        self, P: Factor | None, Q: Factor | None, groups: slice, context: Context, M: Tensor | None = None
    ) -> None:
        """By eigh, largest last."""
        own: DenseBasis = self.narrow(groups)  # over the same memory
        plain = None if M is None else own.unrotate(M[groups], context)
        self._decompose(P, Q, groups, context)
        if M is not None and plain is not None:
            M[groups] = own.rotate(plain)

    def begin_(self, P: Factor | None, Q: Factor | None, context: Context) -> None:
        """By eigh."""
        self._decompose(P, Q, ALL, context)
        for _, U, _ in self._sides(P, Q):
            if U is not None:
                U.copy_(U.flip(-1))  # largest first, as orthogonal iteration orders them

    def _decompose(self, P: Factor | None, Q: Factor | None, groups: slice, context: Context) -> None:
        for factor, U, s in self._sides(P, Q):
            M = factor.dense(groups)
            if U is None:  # a diagonal factor is its own basis
                s[groups] = M
                continue
            try:
                values, vectors = settled_eigh(M, name="factor")
            except NumericalError:
                context.health.fallbacks += M.shape[0]
                continue
            if factor.side == "Q":
                values = whole_spectrum(values, s.shape[-1], None if self.bias is None else self.bias[groups])
            s[groups] = values.to(M.dtype)
            U[groups] = vectors.to(M.dtype)

    def follow_(
        self, P: Factor | None, Q: Factor | None, groups: slice, context: Context, M: Tensor, V: Tensor
    ) -> None:
        """One step of orthogonal iteration, its columns sorted; V is permuted along, M rotated."""
        for factor, U, _ in self._sides(P, Q):
            if U is not None:
                self._iterate(factor.side, factor.dense(groups), U, groups, context, M[groups], V[groups])

    @staticmethod
    def _iterate(
        side: Side, factor: Tensor, whole: Tensor, groups: slice, context: Context, M: Tensor, V: Tensor
    ) -> None:
        U_old, sync, health = whole[groups].clone(), context.host_may_sync, context.health
        MU = factor @ U_old
        order = (U_old * MU).sum(-2).argsort(dim=-1, descending=True)
        Q, order = orthogonal_columns(MU, U_old, order, sync)
        good = finite_matrices(Q)
        health.count("fallbacks", (~good).sum())
        if sync and not bool(good.all()):
            return
        if not sync:
            Q = torch.where(good.view(-1, 1, 1), Q, U_old)
            order = torch.where(good.unsqueeze(-1), order, torch.arange(order.shape[-1], device=order.device))
        whole[groups] = Q
        M.copy_(Q.mT @ (U_old @ M) if side == "P" else (M @ U_old.mT) @ Q)
        index = order.unsqueeze(-1 if side == "P" else -2).expand_as(V)
        V.copy_(V.gather(-2 if side == "P" else -1, index))

    def rotate(self, X: Float[Tensor, "*B K O I"], context: Context | None = None) -> Tensor:
        """``U_Pᵀ X U_Q``."""
        X = X if self.U_P is None else self.U_P.mT @ X
        return X if self.U_Q is None else times_inputs(X, self.U_Q, self.bias)

    def unrotate(self, Y: Tensor, context: Context) -> Tensor:
        """``U_P Y U_Qᵀ``."""
        Y = Y if self.U_P is None else self.U_P @ Y
        return Y if self.U_Q is None else times_inputs(Y, self.U_Q.mT, self.bias)

    def matrices(self, groups: slice) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """U_P, U_Q and the bias's block of some groups, without padding."""
        U_P, U_Q, bias = (None if X is None else X[groups] for X in (self.U_P, self.U_Q, self.bias))
        return U_P, U_Q, bias


# --- the backend -------------------------------------------------------------------------------------------


def average_squares_(v: Tensor, x: Tensor, weight: float) -> None:
    """``v ← v + weight (x² − v)``."""
    v.mul_(1 - weight).addcmul_(x, x, value=weight)


def above(V: Tensor, floor: Tensor) -> Tensor:
    """``max(0, 1 − floor/V)``: how far each entry lies above its group's floor; 0 where both are."""
    floor = per_group(floor.clamp_min(torch.finfo(V.dtype).tiny), V)  # nothing over nothing is none of it
    return (floor / V).neg_().add_(1.0).clamp_min_(0.0)


def damped_scalings(
    s: Tensor, basis: Eigenbasis, left: Tensor | None, right: Tensor | None, constant: Tensor
) -> Tensor:
    """``s + s_P·right + left·s_Q + constant``, what is added at least the least normal number."""
    added = per_group(constant, s)
    if left is not None and right is not None:
        factored = basis.values_P.unsqueeze(-1) * per_group(right, s) + per_group(left, s) * basis.values_Q.unsqueeze(
            -2
        )
        added = factored + added
    return s + added.clamp_min(torch.finfo(s.dtype).tiny)


@dataclass(frozen=True)
class Reference(Backend):
    """Plain torch."""

    solver: str = "auto"

    def factor(self, side: Side, shape: Shape, size: int, power: float, by_channel: bool = False) -> DenseFactor:
        """Zeros."""
        diagonal = side == "Q" and shape.one_hot
        mean = shape.zeros(size) if diagonal else shape.zeros(size, size)
        if side == "P" or diagonal or size == shape.inputs:
            return DenseFactor(side, mean, shape.zeros())
        ones = torch.ones_like(shape.zeros(1))  # SUA: the channels' block, alike at each offset
        return DenseFactor(side, mean, shape.zeros(), shape.taps * ones[:, 0], ones if shape.bias else None)

    def inverse_roots(self, P: Factor | None, Q: Factor | None, power: tuple[float, float], shape: Shape) -> DenseRoots:
        """Identities."""
        roots = [None if M is None else _identity(M.dense(), shape) for M in (P, Q)]
        bias = None if Q is None else Q.bias
        bias = None if bias is None else torch.ones_like(bias)
        return DenseRoots(power, roots[0], roots[1], bias, by_eigh=self.solver == "eigh")

    def eigenbasis(self, P: Factor | None, Q: Factor | None, shape: Shape, *, measured: bool) -> DenseBasis:
        """Identities."""
        U = [None if M is None or M.dense().ndim == 2 else _identity(M.dense(), shape) for M in (P, Q)]
        bias = None if Q is None else Q.bias
        values, has = (shape.zeros(shape.outputs), shape.zeros(shape.inputs)), (P is not None, Q is not None)
        return DenseBasis(U[0], U[1], *values, bias, has)

    def gradient_moments(
        self, grad: Float[Tensor, "K O I"], sides: Sequence[Side], context: Context
    ) -> Iterator[tuple[Side, Tensor]]:
        """One after the other."""
        for side in sides:
            yield side, gram(grad.mT if side == "P" else grad)

    def adam_(
        self, state: State, grad: Float[Tensor, "K O I"], betas: tuple[float, float], eps: float, context: Context
    ) -> Tensor:
        """In torch's own fused pass where it can be: a step of rate −1 from zero is the direction."""
        (b1, b2), m, v, steps = betas, state["m"], state["v"], state["steps"]
        whole = m.is_contiguous() and v.is_contiguous() and grad.is_contiguous() and grad.numel() > 0
        fused = whole and grad.dtype in (torch.float32, torch.float64) and m.dtype == v.dtype == grad.dtype
        if fused and bool((steps == steps[0]).all()):  # not if some groups had no gradient at first
            D, t = torch.zeros_like(grad), steps[0].clone()
            how: dict[str, Any] = {"fused": True, "amsgrad": False, "maximize": False, "weight_decay": 0.0}
            adam([D], [grad], [m], [v], [], [t], beta1=b1, beta2=b2, lr=-1.0, eps=eps, **how)
            steps.copy_(t)
            return D
        steps += 1.0
        m.lerp_(grad, 1 - b1)
        average_squares_(v, grad, 1 - b2)
        t = steps.clamp_min(1).view(-1, 1, 1)
        return m / (1 - b1**t) / (v.sqrt() / (1 - b2**t).sqrt()).add_(eps)

    def adam_in_basis_(
        self, state: State, rotated: Tensor, grad: Tensor, betas: tuple[float, float], eps: float,
        floor: Callable[[Tensor], Tensor | None], context: Context,
    ) -> Tensor:  # fmt: skip
        """Entry by entry."""
        (b1, b2), M, V, steps = betas, state["M"], state["V"], state["steps"]
        steps += 1.0
        M.lerp_(rotated, 1 - b1)
        average_squares_(V, rotated, 1 - b2)
        t = steps.clamp_min(1)
        least, t = floor(1 - b2**t), t.view(-1, 1, 1)
        step = (M / V.sqrt().add_(eps)).mul_((1 - b2**t).sqrt() / (1 - b1**t))
        if least is None:
            return step
        kept = above(V, least)
        context.health.count("floored_layers", (kept.flatten(1).amin(1) == 0).sum())
        return step.mul_(kept)

    def orthogonalized_momentum_(
        self, M: Tensor, grad: Tensor, mu: float, nesterov: bool, orthogonal: Callable[..., Tensor], context: Context,
        *, fused: bool,
    ) -> Tensor:  # fmt: skip
        """As it is written."""
        M.lerp_(grad, 1 - mu)
        return orthogonal(grad.lerp(M, mu) if nesterov else M)

    def average_squares_(self, s: Tensor, R: Tensor, decay: float, context: Context) -> None:
        """A group where squares are not finite keeps its scalings."""
        squares = context.examples * R.square()
        good = torch.isfinite(squares.flatten(1).sum(1)).view(-1, 1, 1)
        s.copy_(torch.where(good, torch.lerp(squares, s, decay), s))

    def damped_quotient(
        self, R: Tensor, s: Tensor, basis: Eigenbasis, added: tuple[Tensor | None, Tensor | None, Tensor], grad: Any,
        average: Average | None = None,
    ) -> Tensor:  # fmt: skip
        """Entry by entry."""
        R = R if average is None else average.moved(R, s, self)
        return R / damped_scalings(s, basis, *added)

    def replace_scalings_(self, s: Tensor, total: Tensor, examples: int, good: Tensor, context: Context) -> None:
        """Group by group."""
        s.copy_(torch.where(per_group(good, s), total.to(s.dtype) / examples, s))

    def damped_scalings(
        self, s: Tensor, basis: Eigenbasis, left: Tensor | None, right: Tensor | None, constant: Tensor
    ) -> Tensor:
        """Entry by entry."""
        return damped_scalings(s, basis, left, right, constant)

    def squares_of_layer(
        self, basis: Eigenbasis, groups: slice, calls: Sequence[Recorded], dtype: torch.dtype
    ) -> Tensor | None:
        """A few examples at a time."""
        assert isinstance(basis, DenseBasis)
        return squares_of_layer(basis.matrices(groups), calls, dtype)


def _identity(M: Tensor, shape: Shape) -> Tensor:
    """The root of a factor without statistics."""
    return torch.ones_like(M) if M.ndim == 2 else shape.eye(M.shape[-1])
