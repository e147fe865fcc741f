"""EKFAC: K-FAC's eigenbasis with corrected eigenvalues."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.foundations.likelihoods import Likelihood
from layerwise.optim.backend import Average, Backend, Eigenbasis
from layerwise.optim.channels import times_inputs
from layerwise.optim.engine import Layerwise
from layerwise.optim.factored_damping import factored_damping
from layerwise.optim.kronecker import FactorPair, check_choice
from layerwise.optim.options import (
    LIKELIHOOD,
    LOSS_AVERAGE,
    Overrides,
    by_scale,
    clip_by_scale,
    positive,
    statistics_options,
)
from layerwise.optim.rule import Context, Observation, Requirements, Shape, State, UpdateRule


@final
@dataclass
class CorrectedEigenvalues(UpdateRule):
    """``U_P [(U_Pᵀ ∇L U_Q) / (s + λ)] U_Qᵀ`` with s the second moments of gradients in the basis.

    scaling "batch": of the examples of the last observed batch; "running": an average over steps of the batch
    gradient's squares times the batch size, begun anew with the factors' eigenvalues at each refresh; "none": these
    eigenvalues themselves (K-FAC with exact damping).
    """

    left: str = "outgrads"
    right: str = "inputs"
    power: tuple[float, float] = (1.0, 1.0)
    split: str = "exact"
    max_factor: int = 8192
    scaling: str = "batch"
    scaling_decay: float = 0.75
    sua: bool = field(default=False, kw_only=True)
    examples_over: int | None = field(default=None, kw_only=True)
    averages: bool = field(default=False, kw_only=True)
    """Whether the average of the gradient is divided in its place. It is kept in the basis, as the state "M", and
    rotated when the basis is renewed: other steps rotate the gradient alone."""
    name = "ekfac"
    formula = "U_P[(U_Pᵀ ∇L U_Q)/(s + λ)]U_Qᵀ"

    def __post_init__(self) -> None:
        self.pair = FactorPair(self.left, self.right, self.max_factor, self.sua)
        check_choice("damping_split", self.split, ("trace", "equal", "exact"))
        check_choice("scaling", self.scaling, ("batch", "running", "none"))
        if self.examples_over is not None:
            positive("examples_over", self.examples_over)

    def requirements(self, shape: Shape | None = None) -> Requirements:
        """Both factors; and examples, or the loss's scale, for s."""
        large = f"a factor would be larger than max_factor={self.max_factor}"
        return replace(
            self.pair.requirements(shape, (0.0, 0.0)),
            factors={"P": self.left, "Q": self.right, "power": "{:g}, {:g}".format(*self.power)},
            examples=self.scaling == "batch",
            loss_scale=self.scaling == "running",
            renewed=("s", "M") if self.averages else ("s",),
            averages=self.averages,
            examples_over=self.examples_over,
            capturable=True,
            deferrable=True,
            only_rotates=True,
            refused=None if shape is None or all(self.pair.sides(shape)) else large,
        )

    def init(self, shape: Shape, backend: Backend) -> State:
        """Factors, their basis, scalings, and perhaps the average of the gradient."""
        state = self.pair.init(shape, backend, (0.0, 0.0))
        measured = self.scaling != "none"
        state["basis"] = backend.eigenbasis(state.get("P"), state.get("Q"), shape, measured=measured)
        state["s"] = backend.scalings(shape, state["basis"], self.scaling, self.scaling_decay)
        return state | ({"M": shape.zeros(shape.outputs, shape.inputs)} if self.averages else {})

    def taken_over(self, found: dict[str, Tensor], sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """The average of the gradient: as it is, where its basis comes with it; else AdamW's m, which earlier versions
        and other members keep out of any basis."""
        if not self.averages or ("M" in found and {"U_P", "U_Q"} & set(sizes) <= set(found)):
            return found
        rest = {name: X for name, X in found.items() if name != "M"}
        M = rest.get("graft_m")
        if M is None or tuple(M.shape[1:]) != sizes["M"]:  # of some rows alone
            return rest
        M = rest["U_P"].to(M).mT @ M if "U_P" in rest else M
        if "U_Q" in rest:
            U_Q = rest["U_Q"].to(M)
            bias = torch.ones_like(U_Q[:, :1, 0]) if M.shape[-1] % U_Q.shape[-1] else None
            M = times_inputs(M, U_Q, bias)
        return {**rest, "M": M}

    def observe(self, state: State, seen: Observation, context: Context) -> None:
        """Factors; and scalings by examples, once the basis is refreshed."""
        self.pair.observe(state, seen, context)
        if self.scaling == "batch" and seen.recorded:
            self._rescale_by_examples(state, seen, context)

    def refresh(self, state: State, groups: slice, context: Context) -> None:
        """Basis, and the factors' own eigenvalues as scalings until better ones come."""
        basis: Eigenbasis = state["basis"]
        basis.refresh_(state["P"], state["Q"], groups, context, state.get("M"))
        context.health.refreshes += 1
        torch.mul(basis.values_P[groups].unsqueeze(-1), basis.values_Q[groups].unsqueeze(-2), out=state["s"][groups])

    def _rescale_by_examples(self, state: State, seen: Observation, context: Context) -> None:
        """Squares of per-example gradients in the basis, summed over examples (and processes)."""
        basis, s, backend = state["basis"], state["s"], context.backend
        dtype, start, totals = basis.values_P.dtype, 0, list[Tensor]()
        together = backend.squares_of_examples(basis, seen, s)
        if together is not None:
            totals.append(together)
        else:
            for calls, k in zip(seen.recorded, seen.groups, strict=True):
                groups = slice(start, start + k)
                total = backend.squares_of_layer(basis, groups, calls, dtype)
                totals.append(torch.zeros_like(s[groups], dtype=dtype) if total is None else total)
                start += k
        start = 0
        for total in seen.add_up(totals):
            groups = slice(start, start + len(total))
            good = torch.isfinite(total.flatten(1).sum(1) / seen.examples)
            good = good if seen.seen is None else good & seen.seen[groups]
            backend.replace_scalings_(s[groups], total, seen.examples, good, context)
            start += len(total)

    def direction(self, state: State, grad: Any, context: Context) -> Any:
        """Into the basis, averaged there, divided by the damped scalings, and back."""
        basis, s, backend = state["basis"], state["s"], context.backend
        R, squares = basis.rotate(grad, context), None
        if self.scaling == "running":
            own = context.gradient is None or grad is context.gradient
            if own and self.split != "exact":  # else what is added depends on s: it is to be moved before
                squares = self.scaling_decay
            else:
                of_gradient = R if own else basis.rotate(context.gradient, context)
                backend.average_squares_(s, of_gradient, self.scaling_decay, context)
        mu, nesterov = context.option("momentum", 0.0), context.option("nesterov", False)
        average = Average(state.get("M"), mu, nesterov, squares, context)  # without momentum M is the gradient itself
        Y = backend.damped_quotient(R, s, basis, self._added(state, context), grad, average)
        return basis.unrotate(Y, context)

    def _added(self, state: State, context: Context) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """(left, right, constant), one number a group: ``s_P·right + left·s_Q + constant`` is added to the scalings.

        A relative damping of factors that are still zero adds 1.
        """
        basis, s, damping = state["basis"], state["s"], context.damping
        O, I = s.shape[-2:] if context.shape is None else (context.shape.own_outputs, context.shape.own_inputs)
        if self.split == "exact" and context.relative:
            mean = s.sum((-2, -1), dtype=basis.values_P.dtype) / (O * I)
            return None, None, torch.where(mean > 0, damping * mean, 1.0)
        if self.split == "exact":
            return None, None, torch.full_like(basis.values_P[:, 0], damping)
        values = basis.values_P, basis.values_Q
        return factored_damping(*values, damping, relative=context.relative, split=self.split, own=(O, I))

    def quadratic(self, state: State, D: Float[Tensor, "K O I"]) -> Tensor | None:
        """``Σ s (U_Pᵀ D U_Q)²``."""
        return (state["s"] * state["basis"].rotate(D).square()).sum()

    def conditions(self, state: State, context: Context) -> tuple[Tensor, Tensor] | None:
        """Of the damped scalings."""
        basis = state["basis"]
        s = state["s"].to(basis.values_P.dtype)
        damped = context.backend.damped_scalings(s, basis, *self._added(state, context))
        if context.shape is not None:
            O, I = context.shape.own_outputs, context.shape.own_inputs
            damped, s = damped[:, :O, :I], s[:, :O, :I]
        damped, added = damped.flatten(1), (damped - s).flatten(1)
        return damped.amax(1) / damped.amin(1), added.amax(1)

    def describe(self, shape: Shape) -> str:
        """The update, and of what its bases are."""
        P, Q, missing = self.pair.words(shape)
        bases = [f"{name} of {of}" for name, of in (("U_P", P), ("U_Q", Q)) if of is not None]
        return f"{self.formula}  {', '.join(bases)}" + missing


class EKFAC(Layerwise):
    """Eigenvalue-corrected K-FAC: ``W ← W − η U_P [(U_Pᵀ ∇L U_Q) / (s + λ)] U_Qᵀ``.

    ``U_P ⊗ U_Q`` is the eigenbasis of K-FAC's factors. ``s`` are second moments of gradients in it: of the last
    batch's examples (``scaling="batch"``), or a running average of the batch gradient's squares times the batch
    size (``scaling="running"``, cheaper: EKFAC-ra).

    Args:
        model: the module that is trained.
        lr: η; by default 1e-3, and 3e-2 for the bare formula.
        damping: λ.
        momentum: of the gradient, as an average (AdamW's β₁); up to 0.95, under autocast, a GPU keeps it in bfloat16.
        weight_decay: decoupled.
        scaling: "batch" or "running".
        scaling_decay: ρ of the running scalings; beyond 0.8 a GPU keeps them in float32, else in bfloat16.
        damping_split: "trace" or "equal" (factored: ``s + λ + √λ(π s_P + s_Q/π)``), or "exact" (``s + λ``).
        sua: convolutions take activations at different kernel offsets to be uncorrelated: U_Q is a basis of the
            channels, alike at each offset, the bias a block of its own; s keeps a number for every weight. Cheaper;
            layers with one offset are unchanged.
        examples_over: on a GPU, steps over which the examples of ``scaling="batch"`` are looked at, at most
            `factor_every`: layers take turns, so that no step is slow, and their inputs and output gradients are kept
            until then. None: as many as there are between statistics. On a CPU a step looks at its own batch.
        scale: "adam": updates of AdamW's size, for AdamW's rate; "formula": the bare formula, momentum being a sum of
            directions.
        clip: bound on the step's predicted change ``η²⟨D, ∇L⟩``, or None. "auto": none, and 1e-3 for the bare formula.
        likelihood: that of the model's output, for labels drawn from it; see `Layerwise`.
        loss_average: how the loss in your loop is reduced: over "examples", over "tokens", or None for a sum.
        overrides: options for layers or parameters by pattern, ``{"*.bias": {"weight_decay": 0.0}}``.
        options: all others of `Layerwise`.

    Reference: George, Laurent, Bouthillier, Ballas and Vincent 2018.

    >>> import torch, layerwise as lw
    >>> opt = lw.optim.EKFAC(torch.nn.Linear(4, 3), scaling="running")
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor | None = None,
        damping: Any = 1e-1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        scale: str = "adam",
        scaling: str = "batch",
        scaling_decay: float = 0.75,
        damping_split: str = "trace",
        sua: bool = False,
        examples_over: int | None = None,
        clip: float | tuple[str, float] | str | None = "auto",
        refresh_every: int = 10,
        max_factor: int = 8192,
        likelihood: str | Likelihood | None = LIKELIHOOD,
        loss_average: str | None = LOSS_AVERAGE,
        overrides: Overrides | None = None,
        **options: Any,
    ) -> None:
        rule = CorrectedEigenvalues(
            split=damping_split,
            max_factor=max_factor,
            scaling=scaling,
            scaling_decay=scaling_decay,
            sua=sua,
            examples_over=examples_over,
            averages=scale == "adam",
        )
        super().__init__(
            model,
            rule=rule,
            scale=scale,
            lr=by_scale(scale, lr, 1e-3, 3e-2),
            damping=damping,
            momentum=momentum,
            weight_decay=weight_decay,
            clip=clip_by_scale(scale, clip),
            refresh_every=refresh_every,
            loss_average=loss_average,
            overrides=overrides,
            **statistics_options(scale, likelihood, options),
        )
