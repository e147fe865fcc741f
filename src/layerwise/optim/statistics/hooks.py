"""`Capture`: sees the user's own forward and backward, and takes statistics from them.

A hook on the model's root opens a tape before a training forward and closes it after. Empirical statistics come
with the user's backward; for sampled (or exact) labels an extra backward is made while the graph is alive, and its
result is *pending* until the user's backward from that output runs. Forwards without gradients, in eval mode, or
whose output is never differentiated leave nothing.
"""

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.distributed.processes import Processes
from layerwise.foundations.cotangents import Cotangent, HessianRoot, SampledLabels
from layerwise.foundations.errors import InteractionError, LayerwiseError, UnsupportedError, describe
from layerwise.foundations.likelihoods import Likelihood
from layerwise.foundations.sharded import all_agree, gathered, is_fully_sharded
from layerwise.foundations.types import Tree, leaves, statistics_dtype
from layerwise.foundations.vectors import unwrap
from layerwise.layers.capture.examine import Notes, examine
from layerwise.layers.capture.model_call import (
    as_statistics,
    backward_of_another,
    example_count,
    has_compiled_parts,
    in_own_arithmetic,
    in_own_forward,
    output_tensor,
    output_tensors,
    uncompiled,
    undisturbed,
)
from layerwise.layers.capture.tape import Tape, explained
from layerwise.layers.capture.verify import NO_AXIS
from layerwise.layers.io.layer_io import LayerIO, Layout, RecordedIO
from layerwise.layers.rules.linear import LinearRule
from layerwise.layers.rules.products import StackedRule
from layerwise.layers.table import LayerSpec, LayerTable
from layerwise.optim.rule import Recorded
from layerwise.optim.statistics.backward import Arrivals, Watch, graph_is_kept
from layerwise.optim.statistics.loss_scale import LossScale, tokens_of, with_class_axis
from layerwise.optim.statistics.output import EMPIRICAL, OutputReader
from layerwise.optim.statistics.root_hooks import RootHook, inputs_of, within_call

RANK_SEEDS = 7919
"""Processes draw labels of their own: seeds this far apart."""
WAITING = 16
"""Forwards that may wait for their backward at once; older ones are let go."""


@dataclass(eq=False)
class Forward:
    """One training forward of the model."""

    tape: Tape | None
    examples: int
    tokens: int
    number: int
    watch: Watch
    counted: bool = False
    """Whether the user's backward has come."""
    again: bool = False
    """Whether another may follow it."""
    labelled: bool = False
    """Whether statistics of drawn labels were taken in: once, whichever outputs the backward reaches first."""
    arrivals: Arrivals | None = None

    def let_go(self) -> None:
        """Nothing more is expected of it."""
        if self.arrivals is not None:
            self.arrivals.close()
            self.arrivals = None
        if self.tape is not None:
            self.tape.release()
            self.tape = None


@dataclass
class Seen:
    """How much one step's forwards and backwards were about."""

    examples: int = 0
    tokens: int = 0
    energy: Tensor | None = None
    """``Σ‖∂L/∂f‖²`` at the output, where statistics are freed of the loss's scale by it."""
    layers: int = 0
    """Calls of layers that statistics came of."""


CHANGED = (
    " as it is now: layers or parameters have changed",
    "change the model, and call add_param_group, before the forward rather than before step()",
)
NOT_FINITE = (
    " with inputs that are finite",
    "give masks as booleans rather than as −inf, and leave out examples with infinity or NaN",
)
"""Why a model is not known, and what helps."""


class Capture:
    """Hooks on a model; `collect` hands over a step's statistics."""

    def __init__(
        self,
        model: nn.Module,
        table: LayerTable,
        estimator: str | None,
        likelihood: Likelihood | None,
        samples: int,
        seed: int,
        scale: LossScale,
        example_axis: int | None,
    ) -> None:
        self.model, self.table, self.scale = unwrap(model), table, scale
        self.estimator, self.likelihood, self.samples, self.seed = estimator, likelihood, samples, seed
        self.example_axis = example_axis
        self.due = True
        """Whether statistics are taken from the next training forward."""
        self.forwards = 0
        """Training forwards so far: names the random labels of each."""
        self.notes: Notes | None = None
        self.unknown: tuple[str, str] | None = None
        """Why there are none, where that is known, and what helps: for an error."""
        self.observe: Callable[[LayerSpec, Recorded], bool | None] | None = None
        """Gets what a layer did; answers False for a layer that it never wants."""
        self.observe_rows: Callable[[LayerSpec, Tensor, Tensor, int, float, tuple[int, int]], bool] | None = None
        """Asked first, with the input and the output's gradient of a layer that was called once; False: not taken."""
        self.before_a_forward: Callable[[], None] = lambda: None
        """Called before a training forward, when a model that has changed can still be recorded as it is now."""
        self.seen = Seen()
        self.reader: OutputReader | None = None
        """Reads the gradient at the output, as long as it wants to."""
        self.scale_free = False
        """Whether empirical statistics are as the gradients come, and their scale is taken out by the step."""
        self.needs_examples = False
        """Whether a layer is of use only if its rows are known to be which example's: a routed token's are not."""
        self.blocks = False
        """Whether layers that ranks divide (tensor parallelism) are seen by each rank's own features alone."""
        self.draws_as: int | None = None
        """The rank whose labels are drawn: ranks with the same batch have the same ones. None: this one."""
        self.rounds = 0
        """Steps that had a training forward: names their labels, so that batches that are accumulated have those that
        they would have as one."""
        self._labelled: int | None = None
        """Examples of the present step that have labels; None before its first forward."""
        self._open: list[tuple[Tape | None, Tree, ExitStack, bool]] = []
        """Forwards under way: the tape, the inputs, what is left when they end, and whether they are compiled."""
        self._pending: list[Forward] = []
        self._unwanted: set[str] = set()
        self._recorded: LayerTable | None = None
        """The table without the layers that nobody wants: those need not be recorded."""
        before: Any = RootHook(self, "before")
        after: Any = RootHook(self, "after")
        first = is_fully_sharded(self.model)  # a model is examined before FSDP gathers it, not in the middle of that
        self._handles = [
            self.model.register_forward_pre_hook(before, with_kwargs=True, prepend=first),
            self.model.register_forward_hook(after, with_kwargs=True, always_call=True),
        ]

    # --- hooks -------------------------------------------------------------------------------------------

    def before(self, compiled: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the model runs: open a tape, if statistics are due; a compiled model calls no hooks of its layers."""
        if in_own_forward() or not torch.is_grad_enabled() or not module.training:
            return
        self.before_a_forward()
        self._release()
        x = inputs_of(args, kwargs)
        tape, under = None, ExitStack()
        if self.estimator is not None and (self.due or self.notes is None) and self._look(x) and self.due:
            tape = self._tape(self._count(x))
            if not compiled:
                if has_compiled_parts(self.model):  # a stance is everybody's: not held where nobody needs it
                    under.enter_context(uncompiled())
                under.enter_context(tape)
                self._be_last()
        self._open.append((tape, x, under, compiled))

    def after(
        self, compiled: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any | None:
        """After it: close the tape, and wait for the backward. Returns an output in place of a compiled model's."""
        if in_own_forward() or not self._open or not torch.is_grad_enabled():
            return None
        tape, x, under, compiled = self._open.pop()
        under.close()
        if out is None or not output_tensor(out).requires_grad:  # the forward raised
            return None
        if tape is None or not compiled:
            self._expect(out, tape, x)
            return None
        with undisturbed(self.model), within_call(module, self._handles[1].id), tape:
            out = module(*args, **kwargs)
        self._expect(out, tape, x)
        return out

    def _expect(self, out: Any, tape: Tape | None, x: Tree) -> None:
        """The backward of a forward."""
        f = output_tensor(out)
        examples, watch = self._count(x), Watch(self.model)
        forward = Forward(tape, examples, tokens_of(f, examples, self.likelihood), self.forwards, watch)
        self.forwards += 1
        self._labelled = self._labelled or 0
        if tape is not None and self.estimator in ("sampled", "exact"):
            self._draw(forward, f)
        elif tape is not None:
            self._listen(forward)
        shown = f.detach() if self.reader is not None and self.reader.wants else None
        for output in output_tensors(out):  # the loss may be of any of them, or one of them
            if output.requires_grad:
                read = shown if output is f else None
                weighs = self.due and (output is f or output.ndim > 0)
                came_back = partial(self._came_back, forward, read, weighs)
                output.register_hook(came_back)
        self._pending.append(forward)

    def _came_back(self, forward: Forward, f: Tensor | None, weighs: bool, g: Tensor) -> None:
        """The user's backward has reached an output of a forward: f, where it is to be read; its energy `weighs`."""
        if backward_of_another(self) or not forward.watch.counts(g):
            return
        if self.scale_free and self.estimator == "empirical" and weighs:
            # One pass; row by row, because a CPU adds up millions of squares one after the other.
            rows = torch.linalg.vector_norm(g.detach(), dim=-1, dtype=statistics_dtype(g.dtype))
            energy = rows.square().sum()
            self.seen.energy = energy if self.seen.energy is None else self.seen.energy + energy
        if f is not None and self.reader is not None and self.reader.wants:
            self.reader.look(f, g, forward.examples, forward.tokens)
        if not forward.counted:
            forward.counted, forward.again = True, graph_is_kept()
            self.seen.examples += forward.examples
            self.seen.tokens += forward.tokens

    # --- statistics --------------------------------------------------------------------------------------

    def _listen(self, forward: Forward) -> None:
        """Hand every layer over as the user's backward reaches it."""
        tape = forward.tape
        assert tape is not None
        examples, batch = forward.examples, (forward.number, 0)
        factor = 1.0 if self.scale_free else self.scale.to_sum(examples, forward.tokens)
        take = self.observe_rows

        def keep(spec: LayerSpec, reached: bool) -> None:
            self._keep_arrived(tape, spec, examples, factor, batch, reached)

        def keep_rows(spec: LayerSpec, x: Tensor, g: Tensor) -> bool:
            taken = take is not None and take(spec, x, g, examples, factor, batch)
            self.seen.layers += taken
            return taken

        forward.arrivals = Arrivals(tape, forward.watch, keep, keep_rows)

    def _draw(self, forward: Forward, f: Tensor) -> None:
        """Labels; where nobody asked for them and they cannot be pulled back, statistics are the loss's from now on."""
        try:
            self._pull_own(forward, f)
        except UnsupportedError as why:
            if self.reader is None or not self.reader.asks:
                raise
            self.estimator, self.likelihood = "empirical", None
            forward.let_go()
            warnings.warn(f"{EMPIRICAL}: labels cannot be drawn, because of {why}", stacklevel=2)

    @in_own_arithmetic  # else the user's autocast would copy all probabilities to float32
    def _pull_own(self, forward: Forward, f: Tensor) -> None:
        """The extra backward of sampled or exact labels; kept aside until the user's backward comes."""
        tape = forward.tape
        assert tape is not None
        assert self.likelihood is not None
        likelihood = with_class_axis(self.likelihood, f)
        n = forward.examples
        cotangent: Cotangent = HessianRoot(likelihood)
        if self.estimator == "sampled":
            rank = Processes().rank if self.draws_as is None else self.draws_as
            cotangent = SampledLabels(likelihood, self.samples, self.seed + RANK_SEEDS * rank)
        with torch.enable_grad():
            read = f if self.estimator == "sampled" and likelihood.samples_half else as_statistics(f)
            terms = likelihood.standardize_asked(read, None, None, self._arrange(n), None)
        before = self._labelled or 0
        self._labelled = before + n
        if before:
            terms = replace(terms, part=(before, before + n))
        waiting: list[tuple[LayerSpec, LayerIO, int]] = []
        count = cotangent.count(terms)
        for v in range(count):
            rows = cotangent.slice(terms, v, v + 1, self.rounds).detach().to(terms.f.dtype)

            def wait(spec: LayerSpec, io: LayerIO, v: int = v) -> None:
                waiting.append((spec, io, v))

            with explained():
                tape.stream(terms.f, rows[0], wait, retain_graph=True, forgetting=True)

        def commit(g: Tensor) -> None:
            if not forward.labelled and not backward_of_another(self) and forward.watch.counts(g):
                forward.labelled = True
                for spec, io, v in waiting:
                    self._keep(spec, io, 1.0, (forward.number, v), n)
                if not graph_is_kept():
                    waiting.clear()

        f.register_hook(commit)

    def _keep_arrived(
        self, tape: Tape, spec: LayerSpec, examples: int, factor: float, batch: tuple[int, int], reached: bool = False
    ) -> None:
        """A layer whose gradients have come."""
        self._keep(spec, tape.io(spec, 1, examples, reached=reached), factor, batch, examples)

    def _keep(self, spec: LayerSpec, io: LayerIO, factor: float, batch: tuple[int, int], examples: int) -> None:
        assert isinstance(io, RecordedIO)
        if self.needs_examples and io.examples != examples:
            return
        self.seen.layers += 1
        factor *= (io.examples / examples) ** 0.5  # of routed tokens every row is an example; G is a mean over N
        if self.observe is not None and self.observe(spec, Recorded(io, factor, batch)) is False:
            self._unwanted.add(spec.name)
            self._recorded = None

    def _arrange(self, n: int) -> Callable[[Tensor], Tensor]:
        layout = Layout() if self.notes is None else self.notes.output

        def front(t: Tensor) -> Tensor:
            lead = tuple(t.shape[:-1])
            fitting = layout if layout.fits(lead, n) or (n == 1 and layout.merged) else Layout()
            return fitting.front(t, t.ndim - 1, n)

        return front

    # --- the model ---------------------------------------------------------------------------------------

    def _be_last(self) -> None:
        """Where the model is itself a layer, its own call must be recorded before the tape is closed."""
        self._handles[1].remove()
        after: Any = RootHook(self, "after")
        self._handles[1] = self.model.register_forward_hook(after, with_kwargs=True, always_call=True)

    def _look(self, x: Tree) -> bool:
        """Examine the model once, in eval mode: batch norm couples examples in train mode, which is no obstacle.

        Returns whether the model is known; a batch that is not finite tells nothing.
        """
        if self.notes is not None:
            return True
        finite = all(bool(torch.isfinite(t).all()) for t in leaves(x) if t.is_floating_point())
        if not all_agree(self.model, finite):  # what follows gathers a sharded model
            self.unknown = NOT_FINITE
            return False
        try:
            with gathered(self.model):
                with undisturbed(self.model):
                    self.model.eval()
                    self.notes = examine(self.model, self.table, x, None, self.example_axis)
                found = self.table.with_uses(self.model, self.notes.uses)
            reasons = self.notes.reasons if self.needs_examples else _beyond_moments(found, self.notes.reasons)
            self.table, self._recorded = found.demote(reasons), None
        except InteractionError:
            self.notes = Notes(self.example_axis or 0, Layout())  # examples first, as far as anyone can tell
        except RuntimeError as error:
            if self.draws_as is None:
                raise
            raise UnsupportedError(
                describe(
                    f"a forward that fails where tensor parallelism does not divide its activations: {error}",
                    "one that takes whole activations, too: the model is examined with them once",
                    "give view a -1 in place of a rank's own number of heads or features",
                )
            ) from error
        return True

    def require_forward(self, member: str) -> None:
        """A step needs to know the model."""
        if self.notes is not None:
            return
        when, advice = "", "build the optimizer before torch.compile and call the model itself, not its parts"
        if not self.model.training:
            when = ", which is in eval mode"
            advice = "call model.train() before the loop (from_pretrained returns a model in eval mode)"
        elif self.unknown is not None:
            when, advice = self.unknown
        raise LayerwiseError(
            describe(
                f"a step of {member} before it has seen a training forward of its model{when}",
                "model(x) in train mode, with gradients, after the optimizer was built",
                advice,
            )
        )

    def look_again(self, table: LayerTable) -> None:
        """The model has changed: examine it at the next forward."""
        self.table, self.notes, self.unknown = table, None, CHANGED
        self.ask_again()

    def ask_again(self) -> None:
        """Layers that nobody wanted may be wanted now."""
        self._recorded, self._unwanted = None, set()

    def _tape(self, examples: int) -> Tape:
        assert self.notes is not None
        if self._recorded is None:
            wanted = tuple(spec for spec in self.table.layers if spec.name not in self._unwanted)
            self._recorded = replace(self.table, layers=wanted)
        return Tape(
            self.model,
            self._recorded,
            self.notes.layouts,
            broadcast=self.notes.broadcast,
            examples=examples,
            until_released=True,
            listens=self.estimator == "empirical",
            by_rows=True,
            blocks=self.blocks,
        )

    def _count(self, x: Tree) -> int:
        if self.notes is None:
            return example_count(x, self.example_axis or 0)
        return example_count(x, self.notes.example_axis, self.notes.shared)

    @property
    def reads_output(self) -> bool:
        """Whether a step asks what the gradient at the output told of the loss."""
        return self.reader is not None or self.estimator == "empirical"

    # --- between steps -----------------------------------------------------------------------------------

    def collect(self) -> Seen:
        """What came since the last call; graphs of forwards are let go."""
        self.drop()
        seen = self._begin_step()
        while self._open:  # of forwards that were interrupted, or raised inside a compiled graph
            self._open.pop()[2].close()
        return seen

    def forget(self) -> None:
        """Gradients are set to zero: what came is of no use, and a forward that is kept may be differentiated anew."""
        self._begin_step()
        for forward in self._pending:
            forward.counted = forward.counted and not forward.again
            forward.labelled = forward.labelled and forward.counted
            if forward.arrivals is not None:
                forward.arrivals.forget()

    def _begin_step(self) -> Seen:
        """What comes now is of another step; returns what was of the last one."""
        seen, self.seen = self.seen, Seen()
        self.rounds += self._labelled is not None
        self._labelled = None
        return seen

    def drop(self) -> None:
        """Let go of forwards that are not differentiated yet."""
        for forward in self._pending:
            forward.let_go()
        self._pending.clear()

    def _release(self) -> None:
        """Let go of forwards whose backward is over, and of old ones that never had one."""
        waiting = [forward for forward in self._pending if not forward.counted]
        for forward in self._pending:
            if forward.counted or forward not in waiting[-WAITING:]:
                forward.let_go()
        self._pending = waiting[-WAITING:]

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _beyond_moments(table: LayerTable, reasons: Mapping[str, str]) -> dict[str, str]:
    """Reasons for which a layer has no statistics: second moments of routed tokens need no axis of examples."""
    routed = {
        spec.name
        for spec in table.layers
        if reasons.get(spec.name) == NO_AXIS and all(isinstance(s.rule, LinearRule | StackedRule) for s in spec.sites)
    }
    return {name: why for name, why in reasons.items() if name not in routed}
