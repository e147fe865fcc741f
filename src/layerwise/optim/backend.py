"""`Backend`: the seam between the mathematics of a member and the machine that it runs on.

A member says which second moments, which powers and which basis. The objects that it gets here own their storage, keep
themselves up to date, and know how they are saved:

    Factor         a running second moment of one side of a stack of layers, ``[K, d, d]``
    InverseRoots   ``(P + shift I)^(−p)`` and ``(Q + shift I)^(−q)``, and their product with a gradient between them
    Eigenbasis     ``U_P ⊗ U_Q`` that diagonalises both factors, and rotations into it and back

Roots and bases come in pairs because a GPU multiplies by both sides in one pass. Two backends make them: `reference`
(plain torch, the one to read first) and `cuda` (split fp16, packed triangles, inverses and bases by products).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.optim.rule import Context, Observation, Recorded, Requirements, Shape, State
from layerwise.optim.step.seen_rows import of_all_rows

ALL = slice(None)
Side = Literal["P", "Q"]
Shifts = Callable[[Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None]]
"""What damping adds to P and Q, one number a group, from the mean eigenvalues of both (None: it is missing)."""


def norms(X: Float[Tensor, "K O I"]) -> Float[Tensor, "K"]:
    """Of each matrix, in no less than float32."""
    return torch.linalg.vector_norm(X.flatten(1), dim=1, dtype=torch.promote_types(X.dtype, torch.float32))


@dataclass(frozen=True)
class Average:
    """Running averages that take the gradient in before a quotient in a basis is made: its own, which is divided in
    its place, and that of its squares, which it is divided by."""

    M: Float[Tensor, "K O I"] | None
    decay: float
    nesterov: bool
    squares_decay: float | None
    """That of the scalings s; None: they stay."""
    context: Context

    def moved(self, R: Any, s: Tensor, backend: "Backend") -> Any:
        """M, or what is one step ahead of it, once both have taken R in; R, where there is no M."""
        if self.squares_decay is not None:
            backend.average_squares_(s, R, self.squares_decay, self.context)
        if self.M is None:
            return R
        R = backend.tensor(R)
        backend.average_(self.M, R, self.decay, self.context)
        M = self.M.to(R.dtype)  # which may be kept in half precision
        return R.lerp(M, self.decay) if self.nesterov else M


class Kept(ABC):
    """A part of a stack's state that owns its tensors."""

    renewed: bool = False
    """Whether a refresh renews it: a checkpoint without it can be loaded too, and processes send it to each other."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """As they are stored, by name; the first axis is K."""

    def saved(self, groups: slice = ALL) -> dict[str, Tensor]:
        """Some groups as a checkpoint has them: plain, without padding. Views, where that is possible."""
        return {name: X[groups] for name, X in self.tensors().items()}

    def load(self, name: str, groups: slice, value: Tensor) -> None:
        """Take back one of those that were saved."""
        self.tensors()[name][groups] = value

    def narrow(self, groups: slice) -> Any:
        """Some groups as an object of their own, over the same memory."""
        return self._mapped(lambda X: X[groups])

    def clone(self) -> Any:
        """A copy."""
        return self._mapped(Tensor.clone)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Any:
        """The same with other tensors; for a dataclass whose fields they are."""
        own: Any = self
        return replace(own, **{f.name: change(X) for f in fields(own) if isinstance(X := getattr(own, f.name), Tensor)})


class Factor(Kept):
    """A running second moment of one side of a stack: of output gradients (P) or inputs (Q)."""

    side: Side
    count: Float[Tensor, "K"]
    """Batches that each group has seen."""
    bias: Float[Tensor, "K 1"] | None
    """Under SUA, the bias's block of Q."""

    @abstractmethod
    def update_(
        self,
        new: Any,
        decay: float,
        context: Context,
        seen: Tensor | None = None,
        how: Literal["mean", "ema", "sum"] = "mean",
    ) -> None:
        """Take a batch's second moment in. Groups that were not `seen`, or whose moment is not finite, stay.

        "mean": an exponential average without the bias of its start; "ema": with it; "sum": added up.
        """

    @abstractmethod
    def mean_eigenvalue(self, groups: slice = ALL) -> Float[Tensor, "K"]:
        """``tr M / d``."""

    @abstractmethod
    def trace(self, groups: slice = ALL) -> Float[Tensor, "K"]:
        """``tr M`` of what is stored."""

    @abstractmethod
    def dense(self, groups: slice = ALL) -> Tensor:
        """As squares ``[K, d, d]``; a diagonal as it is."""

    @abstractmethod
    def product(self, X: Float[Tensor, "K O I"]) -> Float[Tensor, "K O I"]:
        """``P X``, or ``X Q``."""

    def condition(self, shift: Float[Tensor, "K"]) -> Float[Tensor, "K"]:
        """A bound on the condition number of ``M + shift I`` that needs no decomposition: ``(tr M + shift)/shift``.

        Under SUA that of the bias's block, where it is larger.
        """
        least = shift.clamp_min(torch.finfo(shift.dtype).tiny)
        found = (self.trace() + shift) / least
        return found if self.bias is None else torch.maximum(found, (self.bias.sum(-1) + shift) / least)


class InverseRoots(Kept):
    """``(P + shift I)^(−p)`` and ``(Q + shift I)^(−q)`` of a stack's factors; one of them may be missing."""

    renewed = True
    reads_factors: bool = False
    """Whether steps read the factors' present size, through `shifts`: then statistics cannot be deferred."""

    @abstractmethod
    def refresh_(
        self, P: Factor | None, Q: Factor | None, shifts: Shifts, groups: slice, context: Context,
        scale: float | None = None,
    ) -> None:  # fmt: skip
        """Renew some groups, of ``scale·M + shift I``. What cannot be decomposed keeps its last root."""

    @abstractmethod
    def direction(self, X: Float[Tensor, "K O I"], context: Context, shifts: Shifts) -> Any:
        """``P⁻ᵖ X Q⁻ᑫ``, perhaps not yet divided by a scale (`Backend.tensor`). `shifts` are for a backend that keeps
        eigenvalues in place of roots."""


class Eigenbasis(Kept):
    """``U_P ⊗ U_Q``, columns that diagonalise the factors; a factor that is missing or diagonal has the identity."""

    renewed = True
    values_P: Float[Tensor, "K O"]
    values_Q: Float[Tensor, "K I"]
    """Eigenvalues at the last refresh, in the order of the weight's rows and columns."""

    @abstractmethod
    def refresh_(
        self, P: Factor | None, Q: Factor | None, groups: slice, context: Context, M: Tensor | None = None
    ) -> None:
        """Renew some groups; M, as the basis that there is sees it, is rotated along."""

    @abstractmethod
    def begin_(self, P: Factor | None, Q: Factor | None, context: Context) -> None:
        """The first basis of all groups."""

    @abstractmethod
    def follow_(
        self, P: Factor | None, Q: Factor | None, groups: slice, context: Context, M: Tensor, V: Tensor
    ) -> None:
        """Renew some groups from the basis there is; first and second moments M and V, as that basis sees them, are
        carried along. M is rotated; V is permuted as the columns are, where the basis is sorted (`reference`), or mixed
        by the squares of the rotation, where columns keep their places (`cuda`)."""

    @abstractmethod
    def rotate(self, X: Float[Tensor, "*B K O I"], context: Context | None = None) -> Any:
        """``U_Pᵀ X U_Q``; perhaps not yet divided by a scale (`Backend.tensor`)."""

    @abstractmethod
    def unrotate(self, Y: Any, context: Context) -> Any:
        """``U_P Y U_Qᵀ``; likewise."""

    @property
    @abstractmethod
    def trivial(self) -> bool:
        """Whether there is no side to rotate."""


class Backend(ABC):
    """Makes a rule's objects, and does the elementwise ends of steps."""

    # --- objects -----------------------------------------------------------------------------------------

    @abstractmethod
    def factor(self, side: Side, shape: Shape, size: int, power: float, by_channel: bool = False) -> Factor:
        """Without statistics; `power` is what it will be raised to, 0 for a basis; `by_channel`: under SUA."""

    @abstractmethod
    def inverse_roots(
        self, P: Factor | None, Q: Factor | None, power: tuple[float, float], shape: Shape
    ) -> InverseRoots:
        """Identities, until there are statistics."""

    @abstractmethod
    def eigenbasis(self, P: Factor | None, Q: Factor | None, shape: Shape, *, measured: bool) -> Eigenbasis:
        """Identities; `measured`: second moments are measured in it, so that it need not be exact."""

    def scalings(self, shape: Shape, basis: Eigenbasis, scaling: str, decay: float) -> Tensor:
        """Second moments in a basis, ``[K, O, I]``: of examples, or averages with a decay."""
        return shape.zeros(shape.outputs, shape.inputs)

    def momentum(self, shape: Shape, basis: Eigenbasis, decay: float) -> Tensor:
        """An average of gradients in a basis, ``[K, O, I]``, zeros at first."""
        return shape.zeros(shape.outputs, shape.inputs)

    def padding(self, requirements: Requirements, O: int, I: int, like: Tensor, one_hot: bool) -> tuple[int, int]:
        """Zeros to be added to a stack's rows and columns."""
        return 0, 0

    # --- checkpoints -------------------------------------------------------------------------------------

    def pending(self, stack: Any, every: int, step: int) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint has of each layer beside the state of its objects."""
        return {}

    def resume(self, stack: Any, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take that up again."""
        return

    # --- passes ------------------------------------------------------------------------------------------

    def tensor(self, X: Any) -> Tensor:
        """What rotations and roots return, divided by its scales where it has some."""
        return X

    @abstractmethod
    def gradient_moments(
        self, grad: Float[Tensor, "K O I"], sides: Sequence[Side], context: Context
    ) -> Iterator[tuple[Side, Any]]:
        """``∇L ∇Lᵀ`` (P) or ``∇Lᵀ ∇L`` (Q), one after the other."""

    @abstractmethod
    def adam_(
        self, state: State, grad: Float[Tensor, "K O I"], betas: tuple[float, float], eps: float, context: Context
    ) -> Tensor:
        """``m̂/(√v̂ + ε)``, both moments moved towards the gradient and its square before."""

    def adam_norms_(
        self, state: State, grad: Float[Tensor, "K O I"], betas: tuple[float, float], eps: float, context: Context,
        apart: int = 1,
    ) -> Float[Tensor, "K"]:  # fmt: skip
        """The norm of that step, matrix by matrix, moments moved as there; the step itself is not wanted.

        Measured are rows 0, `apart`, 2·`apart`, …, which are all that v has; m has all rows, or these. The norm is that
        of all (`of_all_rows`).
        """
        seen = grad if apart == 1 else grad[:, ::apart][:, : state["v"].shape[1]].contiguous()
        whole = state["m"].shape != state["v"].shape
        part = state | {"m": state["m"][:, ::apart][:, : seen.shape[1]].contiguous()} if whole else state
        found = norms(self.adam_(part, seen, betas, eps, context))
        if whole:
            self.average_(state["m"], grad, betas[0], context)
        return found if apart == 1 else of_all_rows(found, grad, apart, seen.shape[1])

    def average_(self, mean: Float[Tensor, "K O I"], X: Float[Tensor, "K O I"], decay: float, context: Context) -> None:
        """``mean ← decay·mean + (1 − decay)·X``, in a step that is taken."""
        mean.lerp_(X, 1 - decay)

    @abstractmethod
    def adam_in_basis_(
        self, state: State, rotated: Any, grad: Tensor, betas: tuple[float, float], eps: float,
        floor: Callable[[Tensor], Tensor | None], context: Context,
    ) -> Any:  # fmt: skip
        """SOAP's ``M/(√V + ε)·√c₂/c₁`` in its basis; no step where V is not above the `floor` (of c₂)."""

    def no_step(self, basis: Eigenbasis, grad: Float[Tensor, "K O I"]) -> Any:
        """A direction of zero, as of a step that only makes a basis."""
        return torch.zeros_like(grad)

    @abstractmethod
    def orthogonalized_momentum_(
        self, M: Tensor, grad: Tensor, mu: float, nesterov: bool, orthogonal: Callable[..., Tensor], context: Context,
        *, fused: bool,
    ) -> Tensor:  # fmt: skip
        """Muon: ``M ← mu·M + (1 − mu) ∇L``, and the orthogonal factor of M, or with `nesterov` of one step ahead."""

    @abstractmethod
    def average_squares_(self, s: Tensor, R: Any, decay: float, context: Context) -> None:
        """EKFAC's running scalings: ``s ← decay·s + (1 − decay)·N·R²`` of a batch of N."""

    @abstractmethod
    def damped_quotient(
        self, R: Any, s: Tensor, basis: Eigenbasis, added: tuple[Tensor | None, Tensor | None, Tensor], grad: Any,
        average: Average | None = None,
    ) -> Any:  # fmt: skip
        """``R / (s + s_P·right + left·s_Q + constant)`` with `added` (left, right, constant), s and what is divided
        being the averages into which R is taken before, where there are such."""

    @abstractmethod
    def replace_scalings_(self, s: Tensor, total: Tensor, examples: int, good: Tensor, context: Context) -> None:
        """EKFAC's batch scalings: ``s ← total / examples`` for the groups that are `good`."""

    @abstractmethod
    def damped_scalings(
        self, s: Tensor, basis: Eigenbasis, left: Tensor | None, right: Tensor | None, constant: Tensor
    ) -> Tensor:
        """What `damped_quotient` divides by."""

    @abstractmethod
    def squares_of_layer(
        self, basis: Eigenbasis, groups: slice, calls: Sequence[Recorded], dtype: torch.dtype
    ) -> Tensor | None:
        """Squares of one layer's per-example gradients in the basis, summed; None where it had no backward."""

    def squares_of_examples(self, basis: Eigenbasis, seen: Observation, s: Tensor) -> Tensor | None:
        """The same of all layers, if that can be done at once."""
        return None
