"""`CudaBackend`: the objects and passes of a GPU. On a CPU they run too, by plain torch, which is how they are tested.

Nothing here asks the device for a value in a step of the asynchronous executor (`context.device_step`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.layers.io.half_precision import half_chunks, was_half
from layerwise.optim.backend import Average, Backend, Eigenbasis, Factor, InverseRoots, Side
from layerwise.optim.cuda import elementwise_torch, factor, pending_checkpoint, storage
from layerwise.optim.cuda.basis import TrackedBasis, TrackedSide, largest_before
from layerwise.optim.cuda.device_step import all_finite, largest_of, taken
from layerwise.optim.cuda.eigenbasis_elementwise import damped_quotient, divided_to_fp16, squares_ema_
from layerwise.optim.cuda.elementwise import adam_, adam_norms_, corrections_, ema_, momentum_update_, rotated_adam_
from layerwise.optim.cuda.factor import DeviceFactor
from layerwise.optim.cuda.fp16_steps import damped_half, moves
from layerwise.optim.cuda.inverse import DeviceInverse, DeviceRoots
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.linalg.orthogonal import ROOM
from layerwise.optim.cuda.linalg.split_fp16 import product, rough_product
from layerwise.optim.cuda.per_example_squares import alike, squares_of_stack
from layerwise.optim.cuda.pieces import laid_out
from layerwise.optim.cuda.scaled import Scaled, unscaled
from layerwise.optim.cuda.scalings import momentum_dtype, scalings_dtype
from layerwise.optim.cuda.storage import StoredMatrix
from layerwise.optim.cuda.triton.device import on_gpu
from layerwise.optim.cuda.triton.splits import bound_scale
from layerwise.optim.eigenbasis import squares_of_layer
from layerwise.optim.reference import DenseBasis, Reference
from layerwise.optim.rule import Context, Observation, Recorded, Requirements, Shape, State
from layerwise.optim.solver import method
from layerwise.optim.step.stack import Stack

PAD_TO = {"cuda": 16, "meta": 16}
"""Rows and columns of factors are padded to multiples of this, by kind of device."""
SMALL_POWER = 0.25
"""Up to which 11 bits of a gradient will do. A direction ``P⁻¹ G Q⁻¹`` magnifies its rounding about three thousand
times (condition 1e6, damping 1e-3), with powers of ¼ some twenty times."""
ROUGH_SIZE = 256
"""Rows from which factors are rounded to fp16 for sweeps; smaller ones cost little as they are."""
UNBOUNDED_STEP = 2.0**7
"""Of Adam, where its step has no bound."""


def step_bound(beta1: float, beta2: float) -> float:
    """What no entry of ``M/(√V + ε)·√c₂/c₁`` exceeds, at any step, in a basis that stays.

    By Cauchy and Schwarz |M| is at most ``(1 − β₁) √(Σ (β₁²/β₂)ᵗ Σ β₂ᵗ g²)``; with equal averages the bound is 1. Where
    momentum lasts longer than the root of V there is none, only a number that is seldom reached. A basis that turns may
    make more of it, √n times as much at worst; what exceeds it a thousand times is cut off.

    >>> step_bound(0.95, 0.95), round(step_bound(0.9, 0.999), 2)
    (1.0, 7.27)
    """
    if beta1**2 >= beta2:
        return UNBOUNDED_STEP
    return max(1.0, round((1 - beta1) / ((1 - beta2) * (1 - beta1**2 / beta2)) ** 0.5, 6))


@dataclass(frozen=True)
class CudaBackend(Backend):
    """Refinement by products where `solver` says so, exact decompositions elsewhere; passes that wait for nothing."""

    solver: str = "auto"
    precision: str = "high"
    """Of products: "half", fp16, or else split fp16."""
    exact: Reference = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "exact", Reference(self.solver))

    def _by_products(self, power: float, dtype: torch.dtype, device: torch.device) -> bool:
        return method(self.solver, power, dtype, device) == "products"

    # --- objects -------------------------------------------------------------------------------------------

    def padding(self, requirements: Requirements, O: int, I: int, like: Tensor, one_hot: bool) -> tuple[int, int]:
        """Zeros up to multiples of `PAD_TO`: a bias column makes 769 of 768, at which products are six times slower."""
        unit, powers = PAD_TO.get(like.device.type, 1), requirements.powers
        if powers is None or requirements.by_channel:
            return 0, 0
        if not all(p is None or self._by_products(p, like.dtype, like.device) for p in powers):
            return 0, 0
        return -O % unit, 0 if one_hot else -I % unit

    def factor(self, side: Side, shape: Shape, size: int, power: float, by_channel: bool = False) -> DeviceFactor:
        """Packed, where it is large and its inverse or basis is made by products."""
        diagonal = side == "Q" and shape.one_hot
        by_products = not by_channel and not diagonal and self._by_products(power, shape.dtype, shape.device)
        mean = shape.zeros(size) if diagonal else factor.zeros(shape, size, by_products)
        own = shape.own_outputs if side == "P" else shape.own_inputs
        if side == "P" or diagonal or size == shape.inputs:
            return DeviceFactor(side, mean, shape.zeros(), own, by_products)
        ones = torch.ones_like(shape.zeros(1))  # SUA: the channels' block, alike at each offset
        bias = ones if shape.bias else None
        return DeviceFactor(side, mean, shape.zeros(), size, False, shape.taps * ones[:, 0], bias)

    def inverse_roots(
        self, P: Factor | None, Q: Factor | None, power: tuple[float, float], shape: Shape
    ) -> InverseRoots:
        """By products, where one of the factors is treated so."""
        found = [(M, p) for M, p in zip((P, Q), power, strict=True) if isinstance(M, DeviceFactor)]
        if not any(M.by_products for M, _ in found):
            return self.exact.inverse_roots(P, Q, power, shape)
        sides: dict[Side, Any] = {}
        for M, p in found:
            size, rough = factor.size(M.mean), self.precision == "half"
            if not M.by_products:
                sides[M.side] = torch.ones_like(M.mean) if M.mean.ndim == 2 else shape.eye(size)
            elif p != 1:
                side = self._basis(M, shape, shape.zeros(size), measured=False)
                sides[M.side] = replace(side, half_gradient=rough or p <= SMALL_POWER)
            else:
                # One inverse alone (FOOF's) is no great part of a state, and squares of it are a twentieth of the step.
                triangle = len(found) == 2 and factor.packs_inverse(shape, size)
                matrix = StoredMatrix.keep(shape.eye(size), 1 if rough else 2, triangle=triangle)
                sides[M.side] = DeviceInverse(matrix, M.own)
        return DeviceRoots(power, sides, self.solver == "eigh", (P, Q))

    def eigenbasis(self, P: Factor | None, Q: Factor | None, shape: Shape, *, measured: bool) -> Eigenbasis:
        """Tracked by products, where one of the factors is."""
        found = [M for M in (P, Q) if isinstance(M, DeviceFactor)]
        if not any(M.by_products for M in found):
            return self.exact.eigenbasis(P, Q, shape, measured=measured)
        values = {"P": shape.zeros(shape.outputs), "Q": shape.zeros(shape.inputs)}
        sides: dict[str, TrackedSide] = {}
        for M in found:
            if M.by_products:
                sides[M.side] = self._basis(M, shape, values[M.side], measured)
        rough, has = self.precision == "half", (P is not None, Q is not None)
        return TrackedBasis(sides.get("P"), sides.get("Q"), values["P"], values["Q"], rough, has)

    def _basis(self, M: DeviceFactor, shape: Shape, values: Tensor, measured: bool) -> TrackedSide:
        """The identity, of which there is nothing to be seen before the first refresh."""
        size = factor.size(M.mean)
        rough = self.precision == "half" and size >= ROUGH_SIZE
        return TrackedSide(M.side, StoredMatrix.basis(shape.eye(size)), values, M.own, measured, rough)

    def momentum(self, shape: Shape, basis: Eigenbasis, decay: float) -> Tensor:
        """In bfloat16, where products are in half precision and that is enough; see `scalings`."""
        half = self.precision == "half" and isinstance(basis, TrackedBasis)
        dtype = momentum_dtype(shape, decay) if half else shape.dtype
        return shape.zeros(shape.outputs, shape.inputs, dtype=dtype)

    def scalings(self, shape: Shape, basis: Eigenbasis, scaling: str, decay: float) -> Tensor:
        """In bfloat16, where that is enough; see `scalings`."""
        dtype = scalings_dtype(shape, scaling, decay) if isinstance(basis, TrackedBasis) else shape.dtype
        return shape.zeros(shape.outputs, shape.inputs, dtype=dtype)

    # --- checkpoints ---------------------------------------------------------------------------------------

    def pending(self, stack: Stack, every: int, step: int) -> dict[str, dict[str, Tensor]]:
        """Scalings that deferred examples will give."""
        return pending_checkpoint.pending(stack, every, step)

    def resume(self, stack: Stack, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take that up again."""
        pending_checkpoint.resume(stack, saved)

    # --- passes --------------------------------------------------------------------------------------------

    def tensor(self, X: Any) -> Tensor:
        """Divided by the scales of fp16."""
        return unscaled(X)

    def gradient_moments(
        self, grad: Float[Tensor, "K O I"] | Half, sides: Sequence[Side], context: Context
    ) -> Iterator[tuple[Side, Tensor]]:
        """On a GPU in fp16, split where the gradient has more bits; one triangle."""
        if isinstance(grad, Tensor) and not (on_gpu(grad.device) and grad.dtype == torch.float32):
            yield from self.exact.gradient_moments(grad, sides, context)
            return
        rough = self.precision == "half"
        X: Any = grad
        if sides and isinstance(grad, Tensor):
            X = (storage.half_of if rough else storage.operand_of)(grad, largest_of(grad, context))
        for side in sides:
            pair = (X, X.mT) if side == "P" else (X.mT, X)
            yield side, (rough_product if rough else product)(*pair, symmetric=True)

    def adam_(
        self, state: State, grad: Float[Tensor, "K O I"], betas: tuple[float, float], eps: float, context: Context
    ) -> Tensor:
        """In one pass, the moments in the gradient's own order in memory."""
        if all_finite(context) is None:
            return self.exact.adam_(state, grad, betas, eps, context)
        transposed = not grad.is_contiguous() and grad.mT.is_contiguous()
        D = adam_(**self._moments(state, grad, transposed, betas, eps, context))
        return D.mT if transposed else D

    def adam_norms_(
        self, state: State, grad: Float[Tensor, "K O I"] | Half, betas: tuple[float, float], eps: float,
        context: Context, apart: int = 1,
    ) -> Float[Tensor, "K"]:  # fmt: skip
        """In the pass that moves the moments, and bounds m for who multiplies it; the step is not written."""
        if isinstance(grad, Half):
            transposed = False
        elif all_finite(context) is None or grad.dtype != torch.float32:
            return super().adam_norms_(state, grad, betas, eps, context, apart)
        else:
            transposed = apart == 1 and not grad.is_contiguous() and grad.mT.is_contiguous()
        found, largest = adam_norms_(**self._moments(state, grad, transposed, betas, eps, context), apart=apart)
        context.device_step.bound_m(state["m"], largest)
        return found

    def average_(self, mean: Float[Tensor, "K O I"], X: Float[Tensor, "K O I"], decay: float, context: Context) -> None:
        """With a weight on the device; what is not finite would stay so for ever. The mean may be of half precision."""
        former = mean.to(X.dtype)
        mean.copy_(torch.where(torch.isfinite(X), former.lerp(X, taken(1 - decay, X, context)), former))

    @staticmethod
    def _moments(
        state: State, grad: Tensor | Half, transposed: bool, betas: tuple[float, float], eps: float, context: Context
    ) -> dict[str, Any]:
        """Adam's moments and the gradient with matrices in one piece each, and its numbers."""
        (b1, b2), finite = betas, all_finite(context)
        for name in ("m", "v"):
            state[name] = laid_out(state[name], transposed)
        m, v = (X.mT if transposed else X.contiguous() for X in (state["m"], state["v"]))
        g = Scaled(grad.hi, (grad.scale,)) if isinstance(grad, Half) else grad.mT if transposed else grad.contiguous()
        c1, c2 = corrections_(state["steps"], b1, b2, finite)
        numbers = {"beta1": b1, "beta2": b2, "eps": eps, "correction1": c1, "correction2": c2, "all_finite": finite}
        return {"m": m, "v": v, "g": g, **numbers}

    def adam_in_basis_(
        self, state: State, rotated: Any, grad: Tensor | Half, betas: tuple[float, float], eps: float,
        floor: Callable[[Tensor], Tensor | None], context: Context,
    ) -> Any:  # fmt: skip
        """In one pass; not over the gradient itself, which a stack without factors has in place of R.

        Where the basis is kept in fp16 the step is written so, with one scale for all steps, because it is bounded. Its
        rounding is below 1e-3 unless its entries are of the order 1e-6: with gradients that are a million times
        smaller than ε.
        """
        (b1, b2), finite, basis = betas, all_finite(context), state["basis"]
        if finite is None:
            assert isinstance(grad, Tensor)
            M, wide = state["M"], {**state, "M": state["M"].to(state["V"].dtype)}
            Y = self.exact.adam_in_basis_(wide, unscaled(rotated), grad, betas, eps, floor, context)
            state["M"] = M.copy_(wide["M"])
            return Y
        M, V, steps = state["M"], state["V"], state["steps"]
        c1, c2 = corrections_(steps, b1, b2, finite)
        halves = isinstance(basis, TrackedBasis)
        scale = bound_scale(ROOM * step_bound(b1, b2)) if halves else 1.0
        out = None if rotated is grad or isinstance(rotated, Scaled) else rotated
        if halves:
            out = torch.empty(grad.shape, dtype=torch.float16, device=grad.device)
        Y = rotated_adam_(
            M, V, rotated, beta1=b1, beta2=b2, eps=eps, correction1=c1, correction2=c2,
            floor=floor(c2), all_finite=finite, out=out, factor=scale,
        )  # fmt: skip
        return Half(Y, torch.full_like(c1, scale)) if halves else Y

    def no_step(self, basis: Eigenbasis, grad: Any) -> Any:
        """In the form of the other steps, for which there are kernels."""
        if not isinstance(basis, TrackedBasis):
            return super().no_step(basis, grad)
        zeros = torch.zeros(grad.shape, dtype=torch.float16, device=grad.device)
        return Scaled(zeros, (torch.ones_like(basis.values_P[:, 0]),))

    def orthogonalized_momentum_(
        self, M: Tensor, grad: Tensor, mu: float, nesterov: bool, orthogonal: Callable[..., Tensor], context: Context,
        *, fused: bool,
    ) -> Tensor:  # fmt: skip
        """In one pass, which also measures what Newton–Schulz divides by."""
        finite = all_finite(context)
        if finite is not None and grad.dtype == torch.float32 and fused and on_gpu(grad.device):
            update, squares = momentum_update_(M, grad, mu, nesterov, finite)
            return orthogonal(update, squares, divided_to_fp16)
        M.lerp_(grad, taken(1 - mu, grad, context))
        return orthogonal(grad.lerp(M, mu) if nesterov else M)

    def average_squares_(self, s: Tensor, R: Any, decay: float, context: Context) -> None:
        """Behind a test that all gradients are finite, only single squares that overflow are left out."""
        finite = all_finite(context)
        if finite is not None and s.dtype != torch.float64:
            weight = (finite.to(torch.float32) * (1 - decay)).expand(len(s))
            squares_ema_(s, R, weight, context.examples)
            return
        R = R if isinstance(R, Tensor) else unscaled(R)
        squares = context.examples * R.square()
        good = torch.isfinite(squares.flatten(1).sum(1)).view(-1, 1, 1)
        good = good if finite is None else good & finite
        former = s.to(squares.dtype)
        s.copy_(torch.where(good, torch.lerp(squares, former, decay), former))

    def damped_quotient(
        self, R: Any, s: Tensor, basis: Eigenbasis, added: tuple[Tensor | None, Tensor | None, Tensor], grad: Any,
        average: Average | None = None,
    ) -> Any:  # fmt: skip
        """In one pass, over R where that is not the gradient itself; a basis in fp16 has the averages in it, too."""
        numbers, held = (basis.values_P, basis.values_Q, *added), R.C if isinstance(R, Scaled) else R
        halves = isinstance(basis, TrackedBasis)
        if average is not None and not (halves and moves(average, s, held)):
            R, average, held = average.moved(R, s, self), None, grad if average.M is not None else held
        if halves:
            return damped_half(R, s, numbers, largest_before(basis.before, grad), average)
        return damped_quotient(R, s, *numbers, out=None if held is grad else held)

    def replace_scalings_(self, s: Tensor, total: Tensor, examples: int, good: Tensor, context: Context) -> None:
        """In one pass; not in a step that is left out."""
        finite = all_finite(context)
        good = good if finite is None else good & finite
        ema_(s, total, good.to(total.dtype), examples)

    def damped_scalings(
        self, s: Tensor, basis: Eigenbasis, left: Tensor | None, right: Tensor | None, constant: Tensor
    ) -> Tensor:
        """By plain torch: only reports ask for it."""
        return elementwise_torch.damped(s, basis.values_P, basis.values_Q, left, right, constant)

    def squares_of_layer(
        self, basis: Eigenbasis, groups: slice, calls: Sequence[Recorded], dtype: torch.dtype
    ) -> Tensor | None:
        """In half precision where a GPU's layer computed in it; a basis on channels has products of its own."""
        if isinstance(basis, DenseBasis):
            U_P, U_Q, bias = basis.matrices(groups)
        else:
            assert isinstance(basis, TrackedBasis)
            U_P, U_Q = (  # padding has no examples
                None if side is None else side.matrix.value(groups)[:, : side.own] for side in (basis.P, basis.Q)
            )
            bias = None
        if not _by_channel(basis) and in_half_precision(basis.values_P.device, calls):
            U_P, U_Q = (None if U is None else U.bfloat16() for U in (U_P, U_Q))
            return squares_of_layer((U_P, U_Q, None), calls, dtype, half_chunks)
        return squares_of_layer((U_P, U_Q, bias), calls, dtype)

    def squares_of_examples(self, basis: Eigenbasis, seen: Observation, s: Tensor) -> Tensor | None:
        """Plain linear maps that a GPU computed in half precision, all layers together."""
        if _by_channel(basis) or not at_once(s.device, seen):
            return None
        P, Q = _rough(basis)
        return None if P is None or Q is None else squares_of_stack(seen.recorded, P, Q)


def in_half_precision(device: torch.device, calls: Sequence[Recorded]) -> bool:
    """Whether a GPU's layer computed in half precision, so that squares of its examples are made in it."""
    return device.type == "cuda" and all(was_half(io) for io, _, _ in calls)


def at_once(device: torch.device, seen: Observation) -> bool:
    """Whether a GPU looks at the examples of all layers together."""
    return device.type == "cuda" and alike(seen.recorded)


def _by_channel(basis: Eigenbasis) -> bool:
    """Whether a basis is that of the channels alone (SUA)."""
    if not isinstance(basis, DenseBasis) or basis.U_Q is None:
        return False
    return basis.bias is not None or basis.U_Q.shape[-1] != basis.values_Q.shape[-1]


def _rough(basis: Eigenbasis) -> list[tuple[Tensor, Tensor] | None]:
    """U_P and U_Q times a number for each group, as they lie there, and these numbers; None for the identity."""
    if isinstance(basis, TrackedBasis):
        halves = (None if U is None else (U.hi, U.scale) for U in basis.matrices())
        return [*halves]
    assert isinstance(basis, DenseBasis)
    return [None if U is None else (U, torch.ones_like(U[:, 0, 0])) for U in (basis.U_P, basis.U_Q)]
