"""`UpdateRule`: what a member of the family does with the gradient of a stack of equal layers.

A rule sees ``[K, O, I]``: K is every group of every layer of one shape, so that a step is a few batched calls. Its
state is a dictionary of tensors whose first axis is K, updated in place; the engine cuts it by layer for saving.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.layers.io.layer_io import RecordedIO
from layerwise.optim.cuda.scaled import Scaled

State = dict[str, Tensor]


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


@dataclass
class Observation:
    """Statistics of one step for a stack, as means: what a rule observes."""

    A: Tensor | None = None
    """Mean of ``a aᵀ`` over examples and positions: ``[K, I, I]``, its diagonal ``[K, I]`` for one-hot inputs, or that
    of the channels ``[K, c, c]`` where the rule asks for `sua` and the kernel has several offsets."""
    G: Tensor | None = None
    """``1/N Σ g gᵀ`` of the loss's (or the model's) output gradients, ``[K, O, O]``."""
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
    inputs: Any = None
    """In place of A, where its moment was not made: `layerwise.optim.cuda.rows.RowsOfStack`; likewise for G."""
    outgrads: Any = None


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
    weight: Float[Tensor, "K O I"] | None = None
    examples: int = 1
    """Of this step's batch, where known."""
    plan: Any = None
    """Of the refresh under way; None: the rule makes its own."""
    observes: bool = True
    """Whether this step takes statistics of the gradient (`factor_every`)."""
    batches: int | None = None
    """How many steps have taken statistics by now; None: all."""
    gate: Tensor | None = None
    """Whether the step is taken, where only the device knows; see `Health`."""
    shape: Shape | None = None
    """Of the stack."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What the host remembers of a stack from step to step; never saved."""
    gradient: Tensor | None = None
    """The step's own, ``[K, O, I]``."""
    largest: Float[Tensor, "K"] | None = None
    """What none of its entries exceeds, one number a group, where that is known."""
    unit: float = 1.0
    """What ε is multiplied by: how large gradients were at the start, where steps are not to depend on it."""
    asks_along: bool = False
    """Whether the step will ask for ``⟨D, ∇L⟩``: a pass that has both in hand may leave it (`room_for_along`)."""
    along: Float[Tensor, ""] | None = None
    """What such a pass has left, until the direction is made and takes it along."""

    @property
    def age(self) -> int:
        """Of the statistics, in batches: the n-th weighs 1/n in a running mean that is young."""
        return self.step if self.batches is None else self.batches

    def option(self, name: str, default: Any) -> Any:
        """What the parameter group says, where it does; a fallback has options of its own."""
        return self.options.get(name, default)

    def largest_of(self, X: Tensor) -> Tensor | None:
        """`largest`, if this is the step's gradient and not another tensor."""
        return self.largest if X is self.gradient else None

    def room_for_along(self, X: Tensor) -> Tensor | None:
        """A number for ``⟨D, ∇L⟩``, if it is asked for and this is the step's gradient; kept for `with_along`."""
        wanted = self.asks_along and X is self.gradient
        self.along = torch.empty((), dtype=torch.float32, device=X.device) if wanted else None
        return self.along

    def with_along(self, D: Tensor | Scaled) -> Tensor | Scaled:
        """A direction with what a pass has left of it; a tensor cannot carry that."""
        along, self.along = self.along, None
        return D if along is None or isinstance(D, Tensor) else replace(D, along=along)


@dataclass
class Health:
    """What went wrong and was caught, counted.

    On a GPU nobody waits for an answer: whether the step's gradients are finite is a tensor there (`gate`), and counts
    stay on the device until someone asks (`settle`).
    """

    steps: int = 0
    skipped_steps: int = 0
    """Steps left out because a gradient was not finite."""
    skipped_statistics: int = 0
    """Observations left out because they were not finite, or written over while they waited (`statistics`)."""
    clipped_steps: int = 0
    """Steps that were made shorter by `clip`: where these are most of them, it and not `lr` sets the step's size."""
    floored_layers: int = 0
    """Layers, counted at every step, of which some directions had no step because their second moments were rounding
    (SOAP; fused kernels of a GPU do not count)."""
    refreshes: int = 0
    fallbacks: int = 0
    """Decompositions that failed and kept the last good one."""
    refusals: int = 0
    """Refinements by products that failed their test; a further one, or the exact solution, came two steps later."""
    restarts: int = 0
    """Bases that were decomposed anew, because they could not be followed; see `layerwise.optim.cuda.basis_monitor`."""
    condition: dict[str, float] = field(default_factory=dict)
    """Largest condition number of each layer's damped factors, at the last refresh."""
    damping: dict[str, float] = field(default_factory=dict)
    """What was added to each layer's factors (or spectrum), at the last refresh."""
    gate: Tensor | None = field(default=None, repr=False, compare=False)
    """Whether the present step is taken, where only the device knows; None: it is."""
    _open: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def count(self, name: str, amount: int | Tensor) -> None:
        """Add to a count; an amount that only the device knows stays there."""
        if not isinstance(amount, Tensor):
            setattr(self, name, getattr(self, name) + amount)
        elif self.gate is None:
            setattr(self, name, getattr(self, name) + int(amount))
        else:
            if name not in self._open:
                self._open[name] = torch.zeros((), dtype=torch.int64, device=amount.device)
            self._open[name] += amount.to(self._open[name])  # in place: a recorded step adds to the same number

    def settle(self) -> None:
        """Fetch what was counted on the device."""
        for name, amount in self._open.items():
            setattr(self, name, getattr(self, name) + int(amount))
            amount.zero_()

    def taken(self, weight: float, like: Tensor) -> float | Tensor:
        """The weight of something new in an average: as it is given, or 0 in a step that is left out."""
        return weight if self.gate is None else self.gate.to(like) * weight


class UpdateRule(ABC):
    """The direction of a step from the gradient and what was observed."""

    name: ClassVar[str]
    formula: ClassVar[str]
    """Shown by ``print(opt)``."""
    needs_inputs: bool = False
    """Whether layer inputs must be recorded."""
    needs_outgrads: bool = False
    """Whether output gradients must be recorded."""
    solver: str = "auto"
    """How inverses, roots and bases are found: see `layerwise.optim.cuda.monitor`."""
    precision: str = "high"
    """Of products on a GPU: "high", pairs of float16, or "half", one; see `Layerwise`."""
    takes_rows: bool = False
    """Whether it can observe rows in place of moments; see `Observation.inputs`."""
    keeps_recorded: bool = False
    """Whether it looks at examples, so that a batch's inputs and gradients are kept until the step."""
    examples_over: int | None = 1
    """Over how many steps it may look at them (`look_at_examples`); None: where nobody waits for the device, as many as
    there are between statistics. Not inherited. See `layerwise.optim.cuda.deferred_examples`."""
    sua: bool = False
    """Whether inputs of convolutions are observed by channel alone (spatially uncorrelated activations)."""
    averages: bool = True
    """Whether moments are taken of what is recorded."""
    refreshes: bool = False
    """Whether there is anything to refresh."""
    refreshed: tuple[str, ...] = ()
    """State that a refresh renews: what its owner sends to the other processes."""
    kronecker_only: bool = True
    """Whether it is for layers with a Kronecker form; norm layers have none."""
    matrix_only: bool = True
    """Whether it is for matrices; other parameters get the fallback's update."""
    treats_embeddings: bool = True
    """Whether an embedding is a matrix to it, if it looks at inputs."""
    needs_loss_scale: bool = False
    """Whether it compares gradients with statistics, and must know by what the loss was multiplied."""
    recordable: bool = False
    """Whether steps may be recorded as CUDA graphs: statistics of the gradient and the direction then change state in
    place, ask the device for nothing, and do the same whenever state has the same form. Not inherited."""
    own_momentum: str | None = None
    """The option, "momentum" or "betas", whose average the direction is already: as a fallback it gets no momentum on
    top. The optimizer's own rule reads it from the parameter group, where schedulers change it (`Context.option`)."""

    def statistics(self) -> dict[str, str]:
        """What its factors P and Q are second moments of; another member's that say the same can be taken over."""
        return {}

    def accepts(self, shape: Shape) -> str | None:
        """Why a stack of this shape cannot be treated, or None."""
        return None

    @abstractmethod
    def init(self, shape: Shape) -> State:
        """State before the first step."""

    def observe(self, state: State, seen: Observation, decay: float, health: Health) -> None:
        """Take statistics in; cheap. Nothing by default."""
        return

    def observe_gradient(self, state: State, grad: Float[Tensor, "K O I"], decay: float, health: Health) -> None:
        """Take the gradient's own statistics in, before the direction is made. Nothing by default."""
        return

    def factors_wait(self, state: State) -> bool:
        """Whether `observe` may come later for some layers, just before their refresh: it works in place on any part of
        the state, and nothing but a refresh reads what it changes. Not inherited. See `layerwise.optim.cuda.deferred_statistics`."""
        return False

    def refresh(self, state: State, groups: slice, context: Context, health: Health) -> None:
        """Recompute decompositions of some groups; dear. Nothing by default."""
        return

    def pads(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether zeros may be added to a stack's rows and columns without a change of its step. No by default."""
        return False

    def use_solver(self, solver: str) -> None:
        """Take a solver; a rule that cannot use it says so."""
        self.solver = solver

    def plan(self, state: State, groups: slice, context: Context, health: Health) -> Any:
        """What the host decides about a refresh before the device begins. Nothing by default."""
        return None

    def report(self, groups: slice, context: Context) -> None:
        """After a refresh, let the host know how it went. Nothing by default."""
        return

    def sides(self, shape: Shape) -> tuple[bool, bool]:
        """Whether a stack has a left and a right factor. Both, as far as a refresh costs something, by default."""
        return self.refreshes, self.refreshes

    def moments(self, shape: Shape) -> tuple[bool, bool]:
        """Which second moments of a stack are formed: of output gradients, and of inputs. All that are recorded, by
        default; a rule that keeps no factor for a long side asks for no moment of it.
        """
        return self.needs_outgrads, self.needs_inputs

    def parts(self, state: State, plan: Any) -> list[Any]:
        """Plans that together make one: what is refreshed (and recorded) apart. The plan itself by default."""
        return [plan]

    def replayable(self, state: State, plan: Any) -> bool:
        """Whether a refresh only works on the state, in place, and may be recorded. No by default."""
        return False

    def ready(self, state: State, groups: slice) -> bool:
        """Whether there is anything to decompose: a factor that is still zero has no inverse."""
        return True

    def rescale(self, state: State, seen: Observation | None, grad: Tensor, context: Context) -> None:
        """Statistics in a basis that was just refreshed. Nothing by default."""
        return

    def look_at_examples(self, state: State, seen: Observation, context: Context) -> None:
        """The part of `rescale` that is about examples, for some layers of a stack. Nothing by default."""
        return

    def conditions(self, state: State, context: Context) -> tuple[Tensor, Tensor] | None:
        """Condition numbers and damping of every group, for the health report; None where there are none."""
        return None

    @abstractmethod
    def direction(
        self, state: State, grad: Float[Tensor, "K O I"], context: Context, health: Health
    ) -> Float[Tensor, "K O I"]:
        """What the step subtracts, before momentum and learning rate."""

    def scaled_direction(
        self, state: State, grad: Float[Tensor, "K O I"], context: Context, health: Health
    ) -> Float[Tensor, "K O I"] | Scaled:
        """The same as `direction`, where whoever subtracts it can divide on the way."""
        return self.direction(state, grad, context, health)

    def quadratic(self, state: State, D: Float[Tensor, "K O I"]) -> Tensor | None:
        """``⟨D, F D⟩`` with the rule's own curvature, summed; None where it has none."""
        return None

    def describe(self, shape: Shape) -> str:
        """What a layer of this shape gets, in words."""
        return self.formula
