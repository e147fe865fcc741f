"""Rules that step in an eigenbasis of the factors, with a second moment of their own for every entry there."""

from abc import abstractmethod
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import NumericalError
from layerwise.foundations.linalg import settled_eigh
from layerwise.layers.io.half_precision import half_chunks, was_half
from layerwise.layers.io.one_hot import OneHot
from layerwise.layers.io.standard import Standard
from layerwise.optim.channels import times_inputs, whole_spectrum
from layerwise.optim.cuda import factor as symmetric
from layerwise.optim.cuda import scalings
from layerwise.optim.cuda import storage as stored
from layerwise.optim.cuda.basis import (
    BASIS,
    in_halves,
    largest_before,
    rotate,
    scaled_rotate,
    scaled_unrotate,
    track,
    unrotate,
)
from layerwise.optim.cuda.basis_monitor import CLOSELY_COUPLED, LOOSELY_COUPLED
from layerwise.optim.cuda.eigenbasis_elementwise import averaged_quotient_, damped_quotient, squares_ema_
from layerwise.optim.cuda.elementwise import ema_
from layerwise.optim.cuda.elementwise_torch import damped
from layerwise.optim.cuda.factored_damping import factored_damping
from layerwise.optim.cuda.fp16_steps import damped_half
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.monitor import method
from layerwise.optim.cuda.per_example_squares import alike, squares_of_stack
from layerwise.optim.cuda.scaled import Scaled
from layerwise.optim.cuda.unscaled import unscaled
from layerwise.optim.factors import Factors, check_side
from layerwise.optim.options import positive
from layerwise.optim.rule import Context, Health, Observation, Recorded, Shape, State


@dataclass
class EigenFactors(Factors):
    """The basis ``U_P ⊗ U_Q`` of the factors; a factor that is left out, or diagonal, has the identity."""

    refreshed = (*BASIS, "s", "V", "M")

    def method(self, power: float, dtype: torch.dtype, device: torch.device) -> str:
        """Of a basis, whatever the power."""
        return method(self.solver, 0.0, dtype, device)

    def _keep(self, state: State, side: str, shape: Shape, power: float) -> None:
        """The basis; eigenvalues in the order of the weight's rows and columns."""
        size = symmetric.size(state[side])
        by_products = self.method(power, shape.dtype, shape.device) == "newton" and not self.sua
        stored.keep(state, f"U_{side}", shape.eye(size), self.halves_kept(shape, 1.0) if by_products else 0)
        state[f"s_{side}"] = shape.zeros(shape.outputs if side == "P" else shape.inputs)

    def halves_kept(self, shape: Shape, power: float) -> int:
        """One, where second moments are measured in the basis as it is kept.

        Rounding turns it by 2⁻¹², some hundred times less than the sweeps may leave of a drift; but the gradient, whose
        rounding is divided by small moments, is turned in pairs.
        """
        kept = super().halves_kept(shape, power)
        return min(kept, 1) if self.coupling_limit >= LOOSELY_COUPLED else kept

    def init(self, shape: Shape) -> State:
        """Statistics, and identities in place of the basis."""
        state = super().init(shape)
        state.pop("Q_bias_root", None)
        if state.pop("Q_root", None) is not None:  # a diagonal factor is its own basis
            state["s_Q"] = shape.zeros(shape.inputs)
        return state

    def rotate(self, state: State, X: Tensor, largest: Tensor | None = None) -> Tensor:
        """``U_Pᵀ X U_Q``."""
        return rotate(state, X, largest, rough=self.precision == "half")

    def turned(self, state: State, grad: Tensor, context: Context) -> Tensor | Scaled:
        """``U_Pᵀ ∇L U_Q``, perhaps not yet divided: the passes that read it do that."""
        R = scaled_rotate(state, grad, context.largest_of(grad), rough=self.precision == "half")
        return R.contiguous() if isinstance(R, Tensor) else R

    def unrotate(self, state: State, Y: Tensor) -> Tensor:
        """``U_P Y U_Qᵀ``."""
        return unrotate(state, Y)

    def _words(self, P: str | None, Q: str | None) -> str:
        """The update, and of what its bases are."""
        bases = [f"{name} of {of}" for name, of in (("U_P", P), ("U_Q", Q)) if of is not None]
        return f"{self.formula}  {', '.join(bases)}" if bases else super()._words(P, Q)

    def refresh(self, state: State, groups: slice, context: Context, health: Health) -> None:
        """Eigenvectors of the factors."""
        plan = self.plan(state, groups, context, health) if context.plan is None else context.plan
        for side in ("P", "Q"):
            if side in state:
                self._refresh_side(state, side, groups, replace(context, plan=plan), health)
        health.refreshes += 1

    @property
    def coupling_limit(self) -> float:
        """Second moments are measured in whatever basis there is."""
        return LOOSELY_COUPLED

    def tracked(self, state: State, side: str) -> bool:
        """Whether the basis is kept up to date by products."""
        M = state[side]
        return f"U_{side}" in state and not self.sua and self.method(1.0, M.dtype, M.device) == "newton"

    def _refresh_side(self, state: State, side: str, groups: slice, context: Context, health: Health) -> None:
        M = state[side][groups]
        if f"U_{side}" not in state:
            state[f"s_{side}"][groups] = M
            return
        if self.tracked(state, side):
            track(state, side, groups, context, context.plan, self.coupling_limit)
            return
        try:
            values, vectors = settled_eigh(M, name="factor")
        except NumericalError:
            health.fallbacks += M.shape[0]
            return
        if side == "Q":
            bias = state["Q_bias"][groups] if "Q_bias" in state else None
            values = whole_spectrum(values, state["s_Q"].shape[-1], bias)
        state[f"s_{side}"][groups] = values.to(M.dtype)
        state[f"U_{side}"][groups] = vectors.to(M.dtype)

    def _preconditioned(self, state: State, grad: Tensor, context: Context, health: Health) -> Tensor | Scaled:
        """The step in the basis, turned back."""
        Y = self.step_in_basis(state, grad, context, health)
        return torch.zeros_like(grad) if Y is None else context.with_along(scaled_unrotate(state, Y))

    @abstractmethod
    def step_in_basis(
        self, state: State, grad: Float[Tensor, "K O I"], context: Context, health: Health
    ) -> Float[Tensor, "K O I"] | Half | None:
        """What the step subtracts, as the basis sees it (or a half, see `scaled_unrotate`); None: nothing."""


@dataclass
class CorrectedEigenvalues(EigenFactors):
    """EKFAC: ``U_P [(U_Pᵀ ∇L U_Q) / (s + λ)] U_Qᵀ`` with s the second moments of gradients in the basis.

    scaling "batch": of the examples of the last observed batch; "running": an average over steps of the batch
    gradient's squares times the batch size, begun anew with the factors' eigenvalues at each refresh.
    """

    scaling: str = "batch"
    scaling_decay: float = 0.75
    split: str = "exact"
    examples_over: int | None = field(default=None, kw_only=True)
    name = "ekfac"
    recordable = True
    formula = "U_P[(U_Pᵀ ∇L U_Q)/(s + λ)]U_Qᵀ"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_side("scaling", self.scaling, ("batch", "running", "none"))
        self.keeps_recorded = self.scaling == "batch"
        self.needs_loss_scale = self.scaling == "running"
        if self.examples_over is not None:
            positive("examples_over", self.examples_over)

    @property
    def coupling_limit(self) -> float:
        """Close, where scalings are those of the factors themselves."""
        return CLOSELY_COUPLED if self.scaling == "none" else LOOSELY_COUPLED

    def init(self, shape: Shape) -> State:
        """And scalings."""
        by_products = self._newton(1.0, shape)
        dtype = scalings.kept_dtype(shape, self.scaling, self.scaling_decay) if by_products else shape.dtype
        return {**super().init(shape), "s": shape.zeros(shape.outputs, shape.inputs, dtype=dtype)}

    def factors_wait(self, state: State) -> bool:
        """Steps read eigenvalues of the last refresh."""
        return True

    def refresh(self, state: State, groups: slice, context: Context, health: Health) -> None:
        """Basis, and the factors' own eigenvalues as scalings until better ones come."""
        context.memory.pop("rotated", None)
        super().refresh(state, groups, context, health)
        state["s"][groups] = state["s_P"][groups].unsqueeze(-1) * state["s_Q"][groups].unsqueeze(-2)

    def rescale(self, state: State, seen: Observation | None, grad: Tensor, context: Context) -> None:
        """Scalings in the present basis."""
        if self.scaling == "running":
            R = self.turned(state, grad, context)
            R = R if context.gate is not None else unscaled(R)
            due = self._in_one_pass(state, context)
            context.memory["rotated"] = (context.step, grad, grad._version, due, R)
            if not due:
                self._rescale_by_gradient(state, R, context)
        elif self.scaling == "batch" and seen is not None:
            self._rescale_by_examples(state, seen, context)

    def look_at_examples(self, state: State, seen: Observation, context: Context) -> None:
        """Scalings "batch" of some layers, in their present basis."""
        self._rescale_by_examples(state, seen, context)

    def _rescale_by_gradient(self, state: State, R: Tensor | Scaled, context: Context) -> None:
        """Squares of the batch gradient in the basis; a group where they are not finite keeps its scalings.

        Behind a gate the gradient is known to be finite: there only single squares that overflow are left out.
        """
        if self._by_passes(state, context):
            squares_ema_(state["s"], R, self._weight(state, context), context.examples)
            return
        assert isinstance(R, Tensor)
        squares = context.examples * R.square()
        good = torch.isfinite(squares.flatten(1).sum(1)).view(-1, 1, 1)
        good = good if context.gate is None else good & context.gate
        former = state["s"].to(squares.dtype)
        state["s"].copy_(torch.where(good, torch.lerp(squares, former, self.scaling_decay), former))

    def _weight(self, state: State, context: Context) -> Tensor:
        """Of the new squares behind a gate: none in a step that is left out."""
        assert context.gate is not None
        return (context.gate.to(state["s_P"]) * (1 - self.scaling_decay)).expand(len(state["s"]))

    @staticmethod
    def _by_passes(state: State, context: Context) -> bool:
        """Whether steps that nobody waits for are made by the passes of `fused_basis`: not in float64."""
        return context.gate is not None and scalings.computed_dtype(state) == torch.float32

    def _in_one_pass(self, state: State, context: Context) -> bool:
        """Whether running scalings wait for the step that divides by them, which then reads R and s once.

        Not where what damping adds depends on the new scalings, nor for a member with a step of its own.
        """
        waits_for_all = self.split == "exact" and context.relative
        return self._by_passes(state, context) and not waits_for_all and self._own_step

    @property
    def _own_step(self) -> bool:
        """Whether the step is made here, whoever inherits from this."""
        own = CorrectedEigenvalues
        names = ("direction", "scaled_direction", "_preconditioned", "step_in_basis")
        return all(getattr(type(self), name) is getattr(own, name) for name in names)

    def _rescale_by_examples(self, state: State, seen: Observation, context: Context) -> None:
        """Squares of per-example gradients in the basis, summed over examples (and processes)."""
        totals, start = [], 0
        if self._at_once(state, seen):
            totals.append(squares_of_stack(seen.recorded, *(stored.rough(state, name) for name in ("U_P", "U_Q"))))
        else:
            for calls, k in zip(seen.recorded, seen.groups, strict=True):
                totals.append(self._squares_of_layer(state, slice(start, start + k), calls, context))
                start += k
        start = 0
        for total in seen.add_up(totals):
            groups = slice(start, start + len(total))
            good = torch.isfinite(total.flatten(1).sum(1) / seen.examples)
            good = good if seen.seen is None else good & seen.seen[groups]
            good = good if context.gate is None else good & context.gate
            ema_(state["s"][groups], total, good.to(total.dtype), seen.examples)
            start += len(total)

    def _at_once(self, state: State, seen: Observation) -> bool:
        """Whether examples of all layers are looked at together: plain linear maps that a GPU computed in halves."""
        both = "U_P" in state and "U_Q" in state
        return both and not self.sua and state["s"].device.type == "cuda" and alike(seen.recorded)

    def _squares_of_layer(self, state: State, groups: slice, calls: list[Recorded], context: Context) -> Tensor:
        """Of one layer, summed over its backwards; in half precision where a GPU's layer computed in it."""
        s, total, dtype = state["s"][groups], None, scalings.computed_dtype(state)
        half = self._by_halves(s.device, calls)
        basis = self._own_basis(state, groups, None if half else context.shape) if calls else {}
        if half:
            basis = {name: U.bfloat16() for name, U in basis.items()}
        for io, factor, _ in calls:
            for chunk in half_chunks(io) if half else io.chunks():
                assert isinstance(chunk, Standard)
                found = (
                    chunk.rotated_squared_sum(basis.get("U_Q"), basis["U_P"]) if half else self._squares(basis, chunk)
                )
                squares = factor**2 * found.to(dtype)
                total = squares if total is None else total.add_(squares)
        return torch.zeros_like(s, dtype=dtype) if total is None else total.contiguous()

    def _by_halves(self, device: torch.device, calls: list[Recorded]) -> bool:
        """Not with a basis on channels, which has products of its own."""
        return device.type == "cuda" and not self.sua and all(was_half(io) for io, _, _ in calls)

    @staticmethod
    def _own_basis(state: State, groups: slice, shape: Shape | None) -> State:
        """The basis of some groups, its rows without padding: recorded inputs and gradients have none."""
        basis = {name: stored.value(state, name, groups) for name in ("U_P", "U_Q", "Q_bias") if name in state}
        if shape is not None and any(shape.padding):
            for name, own in (("U_P", shape.own_outputs), ("U_Q", shape.own_inputs)):
                if name in basis:
                    basis[name] = basis[name][:, :own]
        return basis

    def _squares(self, basis: State, chunk: Standard) -> Float[Tensor, "K O I"]:
        """``Σ (U_Pᵀ (Σ_s g aᵀ) U_Q)²``; a basis on channels turns the gradients, or the inputs where they are fewer."""
        U_P, U_Q = basis["U_P"], basis.get("U_Q")
        if U_Q is None or isinstance(chunk.a, OneHot) or chunk.a.shape[-1] == U_Q.shape[-2]:
            return chunk.rotated_squared_sum(U_Q, U_P)
        if chunk.a.shape[1] < chunk.g.shape[-1]:
            a = times_inputs(chunk.a.transpose(1, 2), U_Q, basis.get("Q_bias")).transpose(1, 2)
            return Standard(a, chunk.g).rotated_squared_sum(None, U_P)
        return self.rotate(basis, chunk.per_example_grads()).square().sum((0, 1))

    def step_in_basis(
        self, state: State, grad: Float[Tensor, "K O I"], context: Context, health: Health
    ) -> Float[Tensor, "K O I"] | Half:
        """Divide by the damped scalings, which may have waited for it. ``⟨U_P Y U_Qᵀ, ∇L⟩`` is ``⟨Y, R⟩``."""
        (R, due), s, halves = self._rotated(state, grad, context), state["s"], in_halves(state)
        along = context.room_for_along(grad) if halves and self._own_step else None
        added = (state["s_P"], state["s_Q"], *self._added(state, context))
        if halves:
            average = {"weight": self._weight(state, context), "factor": context.examples} if due else {}
            return damped_half(R, s, added, largest_before(context, grad), along=along, **average)
        held = R.C if isinstance(R, Scaled) else R
        out = None if held is grad else held
        if due:
            return averaged_quotient_(s, R, self._weight(state, context), context.examples, *added, out=out)
        return damped_quotient(R, s, *added, out=out)

    def _rotated(self, state: State, grad: Tensor, context: Context) -> tuple[Tensor | Scaled, bool]:
        """The gradient in the basis: from `rescale`, if that was of this gradient at this step, and used once.

        And whether the scalings have not seen it yet.
        """
        step, same, version, due, R = context.memory.pop("rotated", (0, None, 0, False, None))
        if R is not None and same is grad and (step, version) == (context.step, grad._version):
            return R, due
        if R is not None and due and step == context.step:  # a direction of something else
            self._rescale_by_gradient(state, R, context)
        return self.turned(state, grad, context), False

    def _added(self, state: State, context: Context) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """(left, right, constant), one number a group: ``s_P·right + left·s_Q + constant`` is added to the scalings.

        A relative damping of factors that are still zero adds 1.
        """
        s, s_P, s_Q, damping = state["s"], state["s_P"], state["s_Q"], context.damping
        O, I = s.shape[-2:] if context.shape is None else (context.shape.own_outputs, context.shape.own_inputs)
        if self.split == "exact" and context.relative:
            mean = s.sum((-2, -1), dtype=s_P.dtype) / (O * I)
            return None, None, torch.where(mean > 0, damping * mean, 1.0)
        if self.split == "exact":
            return None, None, torch.full_like(s_P[:, 0], damping)
        return factored_damping(s_P, s_Q, damping, relative=context.relative, split=self.split, own=(O, I))

    def _damped(self, state: State, context: Context) -> Tensor:
        """Scalings with what is added."""
        return damped(state["s"], state["s_P"], state["s_Q"], *self._added(state, context))

    def quadratic(self, state: State, D: Float[Tensor, "K O I"]) -> Tensor | None:
        """``Σ s (U_Pᵀ D U_Q)²``."""
        return (state["s"] * self.rotate(state, D).square()).sum()

    def conditions(self, state: State, context: Context) -> tuple[Tensor, Tensor] | None:
        """Of the damped scalings."""
        damped, s = self._damped(state, context), state["s"]
        if context.shape is not None:
            O, I = context.shape.own_outputs, context.shape.own_inputs
            damped, s = damped[:, :O, :I], s[:, :O, :I]
        damped, added = damped.flatten(1), (damped - s).flatten(1)
        return damped.amax(1) / damped.amin(1), added.amax(1)

    def accepts(self, shape: Shape) -> str | None:
        """Both factors are needed."""
        if not all(self.sides(shape)):
            return f"a factor would be larger than max_factor={self.max_factor}"
        return None
