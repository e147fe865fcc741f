"""`UpdateRule`: what a member of the family does with the gradient of a stack of equal layers, in six methods.

    requirements   what it needs to see, and which layers it is for
    init           its state before the first step
    observe        takes statistics in, as they come; cheap
    refresh        renews decompositions of some layers; expensive
    direction      what the step subtracts, before momentum and learning rate
    describe       what a layer gets, in words

A rule sees stacks ``[K, O, I]``: K is every group of every layer of one shape, so that a step is a few batched calls.
It is mathematics alone. How a second moment is stored, how its inverse is kept up to date and whether the host may
wait for the device is the business of the `Backend` (`context.backend`) and of the executor that calls the rule.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.layers.io.layer_io import RecordedIO

if TYPE_CHECKING:
    from layerwise.optim.backend import Backend, Kept

State = dict[str, Any]
"""A rule's state of one stack by name: tensors ``[K, ...]``, and objects that own theirs (`backend.Kept`)."""


class Recorded(NamedTuple):
    """A layer's inputs and output gradients in one backward."""

    io: RecordedIO
    factor: float
    """Makes its gradients those of a sum over examples."""
    batch: tuple[int, int]
    """Which forward, and which of its cotangents."""


@dataclass(frozen=True)
class Shape:
    """A stack: K groups of an O × I matrix."""

    groups: int
    outputs: int
    inputs: int
    dtype: torch.dtype
    device: torch.device
    one_hot: bool = False
    """Inputs are indices: the input factor is diagonal."""
    taps: int = 1
    """Kernel offsets that one input channel covers."""
    bias: bool = False
    """Whether the last column is the bias."""
    padding: tuple[int, int] = (0, 0)
    """Rows and columns of zeros that were added to O and I, for the sake of a GPU's products."""

    @property
    def own_outputs(self) -> int:
        """O without padding."""
        return self.outputs - self.padding[0]

    @property
    def own_inputs(self) -> int:
        """I without padding."""
        return self.inputs - self.padding[1]

    @property
    def channels(self) -> int:
        """c: ``I = c · taps``, and one more for a bias."""
        return (self.own_inputs - self.bias) // self.taps

    def zeros(self, *axes: int, dtype: torch.dtype | None = None) -> Tensor:
        """``[K, *axes]`` of zeros; of the stack's own type if none is given."""
        return torch.zeros(self.groups, *axes, dtype=dtype or self.dtype, device=self.device)

    def eye(self, size: int) -> Tensor:
        """K identities."""
        return torch.eye(size, dtype=self.dtype, device=self.device).repeat(self.groups, 1, 1)


@dataclass(frozen=True)
class Requirements:
    """What a rule needs to see, and which layers it is for."""

    inputs: bool = False
    """Whether second moments of layer inputs are taken; of a shape, whether of this one."""
    outgrads: bool = False
    """The same of output gradients."""
    gradient: bool = False
    """Whether statistics of the step's own gradient are taken, before its direction is made."""
    examples: bool = False
    """Whether it looks at single examples: a batch's inputs and output gradients are kept for it."""
    moments: bool = True
    """Whether second moments are formed of what is recorded."""
    by_channel: bool = False
    """Whether inputs of convolutions are observed by channel alone (SUA, spatially uncorrelated activations)."""
    matrices_only: bool = True
    """Whether it is for matrices; other parameters get the fallback's update."""
    kronecker_only: bool = True
    """Whether it is for layers with a Kronecker form; norm layers have none."""
    elementwise: bool = False
    """Whether every entry is treated alone, so that a shard of a parameter can be treated without the rest."""
    loss_scale: bool = False
    """Whether it compares gradients with statistics, and must know by what the loss was multiplied."""
    refreshes: bool = False
    """Whether there is anything to refresh."""
    powers: tuple[float | None, float | None] | None = None
    """Of the factors P and Q, None for one that there is not, 0 for an eigenbasis; None: it has no such factors."""
    factors: Mapping[str, str] = field(default_factory=dict)
    """What P and Q are second moments of: another member's checkpoint that says the same can be loaded."""
    renewed: tuple[str, ...] = ()
    """Tensors of its state that a refresh renews, beside roots and bases: sent to the other processes after it."""
    own_momentum: str | None = None
    """The option, "momentum" or "betas", whose average the direction is already: as a fallback it gets no momentum on
    top. The optimizer's own rule reads it from the parameter group, where schedulers change it (`Context.option`)."""
    averages: bool = False
    """Whether it keeps the gradient's average itself, with the group's momentum, where updates have AdamW's size: it is
    then given the gradient, and AdamW's m is kept only of the rows by which the norm of its update is measured."""
    examples_over: int | None = 1
    """Over how many steps it lets examples be looked at; None: on a GPU, as many as there are between statistics."""
    capturable: bool = False
    """Whether steps may be captured as CUDA graphs: `direction` changes state in place, asks the device for nothing,
    and does the same whenever state has the same form. Where it takes statistics itself (`Context.observes`), neither
    `inputs` nor `outgrads` may be asked for: steps with and without those are one graph."""
    deferrable: bool = False
    """Whether `observe` of second moments may come later for some layers, just before their refresh: nothing but a
    refresh reads what it changes."""
    only_rotates: bool = False
    """Whether `direction` does nothing with a gradient but rotate it by a basis of the backend's, hand it to methods of
    the backend and ask for its shape. On a GPU it may then be fp16 with a scale for each matrix, an object without a
    tensor's arithmetic."""
    flat_spectrum: bool = False
    """Whether all singular values of a direction are about the same, so that none need be capped."""
    refused: str | None = None
    """Why a stack of this shape cannot be treated, if so."""

    @property
    def keeps_momentum(self) -> bool:
        """Whether the rule itself keeps an average of the gradient."""
        return self.own_momentum is not None or self.averages

    @property
    def learns(self) -> bool:
        """Whether a step has more to do than a direction: statistics to take, or decompositions to refresh."""
        return self.inputs or self.outgrads or self.gradient or self.examples or self.refreshes


@dataclass
class Observation:
    """What a step has seen of a stack. `observe` gets second moments, the gradient and examples one after the other."""

    A: Any = None
    """Mean of ``a aᵀ`` over examples and positions: ``[K, I, I]``, its diagonal ``[K, I]`` for one-hot inputs, or that
    of the channels ``[K, c, c]`` where the rule asks for that and the kernel has several offsets. A backend may get
    the rows in its place."""
    G: Any = None
    """``1/N Σ g gᵀ`` of the loss's (or the model's) output gradients, ``[K, O, O]``."""
    gradient: Float[Tensor, "K O I"] | None = None
    """The step's own, where statistics of it are due."""
    seen: Tensor | None = None
    """Which groups were observed, ``[K]``; a layer that was not called keeps its statistics. None: all."""
    recorded: list[list[Recorded]] = field(default_factory=list)
    """For rules that look at examples, per layer."""
    groups: list[int] = field(default_factory=list)
    """Groups of each layer."""
    known: list[bool] = field(default_factory=list)
    """`seen`, as the host has it."""
    examples: int = 0
    add_up: Callable[[Sequence[Tensor]], list[Tensor]] = list
    """Sums over the processes that train together."""


@dataclass
class Context:
    """What a rule may want to know of the step."""

    step: int
    """From 1."""
    lr: float
    damping: float
    relative: bool
    """Whether damping is relative to mean eigenvalues."""
    options: Mapping[str, Any]
    """The parameter group."""
    backend: "Backend" = None  # type: ignore[assignment]
    """Makes a rule's objects, and does what a GPU does in one pass."""
    health: "Health" = field(default_factory=lambda: Health())
    shape: Shape | None = None
    """Of the stack."""
    examples: int = 1
    """Of this step's batch, where known."""
    observes: bool = True
    """Whether this step takes statistics of the gradient (`factor_every`)."""
    refresh_every: int = 10
    """Steps between decompositions."""
    unit: float = 1.0
    """What ε is multiplied by: how large gradients were at the start, where steps are not to depend on it."""
    gradient: Float[Tensor, "K O I"] | None = None
    """The step's own; what `direction` gets may be an average of it."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What the host remembers of a stack from step to step; never saved."""
    device_step: Any = None
    """What only the device knows of the step (`cuda.device_step.DeviceStep`); None: the host may look at values."""

    @property
    def host_may_sync(self) -> bool:
        """Whether the host may look at values of tensors. On a GPU it would wait for the whole backward."""
        return self.device_step is None

    def is_taken(self) -> bool:
        """Whether the step is taken: its gradients are finite. Where only the device knows, the host waits for it."""
        return self.device_step is None or self.device_step.is_taken()

    def option(self, name: str, default: Any) -> Any:
        """What the parameter group says, where it does; a fallback has options of its own."""
        return self.options.get(name, default)


@dataclass
class Health:
    """What went wrong and was caught, counted. Amounts that only a device knows stay there until someone asks."""

    steps: int = 0
    skipped_steps: int = 0
    """Steps left out because a gradient was not finite."""
    skipped_statistics: int = 0
    """Observations left out because they were not finite, or written over before they were taken in."""
    clipped_steps: int = 0
    """Steps that were made shorter by `clip`: where these are most of them, it and not `lr` sets the step's size."""
    floored_layers: int = 0
    """Layers, counted at every step, of which some directions had no step because their second moments were rounding
    (SOAP; fused kernels of a GPU do not count)."""
    refreshes: int = 0
    fallbacks: int = 0
    """Decompositions that failed and kept the last good one."""
    refusals: int = 0
    """0: of earlier versions, whose inverses and bases were refined and tested."""
    restarts: int = 0
    """0: of earlier versions, whose bases were decomposed anew where they could not be followed."""
    condition: dict[str, float] = field(default_factory=dict)
    """Largest condition number of each layer's damped factors, at the last refresh."""
    damping: dict[str, float] = field(default_factory=dict)
    """What was added to each layer's factors (or spectrum), at the last refresh."""
    on_device: bool = field(default=False, repr=False, compare=False)
    """Whether counts that are tensors stay on the device for now."""
    _pending: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def count(self, name: str, amount: int | Tensor) -> None:
        """Add to a count; an amount that only the device knows stays there."""
        if not isinstance(amount, Tensor):
            setattr(self, name, getattr(self, name) + amount)
        elif not self.on_device:
            setattr(self, name, getattr(self, name) + int(amount))
        else:
            if name not in self._pending:
                self._pending[name] = torch.zeros((), dtype=torch.int64, device=amount.device)
            self._pending[name] += amount.to(self._pending[name])  # in place: a captured step adds to the same number

    def settle(self) -> None:
        """Fetch what was counted on the device."""
        for name, amount in self._pending.items():
            setattr(self, name, getattr(self, name) + int(amount))
            amount.zero_()


class UpdateRule(ABC):
    """The direction of a step from the gradient and what was observed."""

    name: ClassVar[str]
    formula: ClassVar[str]
    """Shown by ``print(opt)``."""

    def requirements(self, shape: Shape | None = None) -> Requirements:
        """What it needs to see, and which layers it is for; of a stack of this shape, where one is given."""
        return Requirements()

    @abstractmethod
    def init(self, shape: Shape, backend: "Backend") -> State:
        """State before the first step."""

    def taken_over(self, found: dict[str, Tensor], sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """What is taken of a layer's saved state, that of an earlier version or of another member; `sizes` are those of
        this rule's own."""
        return found

    def observe(self, state: State, seen: Observation, context: Context) -> None:
        """Take in second moments, the gradient or, after a refresh, examples; whichever `seen` has. Nothing by
        default."""
        return

    def refresh(self, state: State, groups: slice, context: Context) -> None:
        """Recompute decompositions of some groups. Nothing by default."""
        return

    @abstractmethod
    def direction(self, state: State, grad: Float[Tensor, "K O I"], context: Context) -> Float[Tensor, "K O I"]:
        """What the step subtracts, before momentum and learning rate."""

    def describe(self, shape: Shape) -> str:
        """What a layer of this shape gets, in words."""
        return self.formula

    # --- for those who ask -------------------------------------------------------------------------------

    def conditions(self, state: State, context: Context) -> tuple[Tensor, Tensor] | None:
        """Condition numbers and damping of every group, for the health report; None where there are none."""
        return None

    def quadratic(self, state: State, D: Float[Tensor, "K O I"]) -> Tensor | None:
        """``⟨D, F D⟩`` with the rule's own curvature, summed, for adaptive damping; None where it has none."""
        return None


def kept(state: State) -> "list[Kept]":
    """The objects of a state that own their tensors."""
    return [entry for entry in state.values() if not isinstance(entry, Tensor)]


def tensors(state: State) -> dict[str, Tensor]:
    """All tensors of a state, as they are stored."""
    found: dict[str, Tensor] = {}
    for name, entry in state.items():
        found |= {name: entry} if isinstance(entry, Tensor) else entry.tensors()
    return found
