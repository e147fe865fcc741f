"""`ModelRecorder`: runs a model batch after batch, and verifies what it records on the graph of each.

How the model has to be run is proposed by `examine` from a few examples; that it is right is seen on the graph of the
batch itself (`verify`), once for every graph, and always where the graph depends on the data.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from layerwise.foundations.device import Checks, Readback, not_finite
from layerwise.foundations.errors import InputError, describe, not_one_of
from layerwise.foundations.likelihoods import Reading, Terms
from layerwise.foundations.random import stream
from layerwise.foundations.types import Tree, leaves, unwrap
from layerwise.layers.capture.copies import Copies
from layerwise.layers.capture.examine import Notes, examine, likely_axes, specs_at
from layerwise.layers.capture.explain import Explanation
from layerwise.layers.capture.graph import Graph, parameter_names
from layerwise.layers.capture.model_call import (
    Snapshot,
    as_statistics,
    call,
    check_devices,
    example_count,
    refuse_empty,
    refuse_train_mode_batch_norm,
    substituted,
    undisturbed,
)
from layerwise.layers.capture.tape import Tape
from layerwise.layers.capture.uses import Used
from layerwise.layers.capture.vectorised import tolerance
from layerwise.layers.capture.verify import NO_AXIS, Verification, aligned_calls, noise, verify
from layerwise.layers.io.layer_io import CHUNK_BYTES, GradientIO, LayerIO, Layout
from layerwise.layers.rules.generic import ExampleGradients
from layerwise.layers.table import LayerSpec, LayerTable

Check = Literal["always", "first", "never"]


@dataclass(frozen=True)
class Batch:
    """One batch of data, and its number."""

    x: Tree
    y: object
    mask: Tensor | None
    number: int
    part: tuple[int, int] | None = None
    """First example and number of examples of the whole, where this is a part of a batch."""
    found_finite: tuple[int, ...] = ()
    """Versions of its tensors at which all their values were found finite, such as those of what this was cut from."""

    def versions(self) -> tuple[int, ...]:
        """How often each tensor has been written to, if that is known; a view has the version of what it is of."""
        tensors = list(leaves((self.x, self.y)))
        return () if any(t.is_inference() for t in tensors) else tuple(t._version for t in tensors)


def add_batch_checks(checks: Checks, batch: Batch) -> None:
    """Finiteness of inputs and targets, and a mask of zeros and ones."""
    mask, number = batch.mask, batch.number
    if batch.found_finite and mask is None and batch.found_finite == batch.versions():
        return
    if mask is not None and mask.dtype != torch.bool:
        checks.add(((mask != 0) & (mask != 1)).any(), lambda: _odd_mask(number))
    target = batch.y if mask is None else None  # where a target is masked it may be anything
    for tensor in leaves((batch.x, target)):
        if tensor.is_floating_point():
            checks.add(not_finite(tensor), lambda tensor=tensor: _odd_values(tensor, number))


def add_output_check(checks: Checks, f: Tensor, number: int) -> None:
    """Finiteness of the model's output."""
    checks.add(not_finite(f), lambda: _odd_output(number))


def _odd_mask(number: int) -> InputError:
    return InputError(
        describe(
            f"batch {number} with a third entry whose values are not all 0 or 1",
            "a mask (x, y, mask): which positions count",
            "pass (x, y) alone, or a bool mask",
        )
    )


def _odd_values(tensor: Tensor, number: int) -> InputError:
    bad = int((~torch.isfinite(tensor)).sum())
    return InputError(
        describe(
            f"batch {number} with {bad} values that are NaN or infinite",
            "finite inputs and targets",
            "clean the data or leave the batch out; nothing of this call was kept",
        )
    )


def _odd_output(number: int) -> InputError:
    return InputError(
        describe(
            f"batch {number}, on which the model's output is NaN or infinite",
            "finite outputs",
            "check the parameters and the inputs; nothing of this call was kept",
        )
    )


class ModelRecorder:
    """Runs a model under a tape and hands out every layer's standard form."""

    def __init__(
        self,
        model: nn.Module,
        table: LayerTable,
        example_axis: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        seed: int = 0,
        check: Check = "first",
    ) -> None:
        if check not in ("always", "first", "never"):
            raise InputError(not_one_of("check", check, ("always", "first", "never")))
        self.seed = seed
        self.model, self.table = unwrap(model), table
        self.given_axis = example_axis
        self.chunk_bytes = chunk_bytes
        self.findings: Notes | None = None
        self.checks = Checks()
        """Of batches and outputs; inside a session they are read back together, later than they are made."""
        self.check = check
        self._examined_on = 0
        self._given = self._first_table = table
        """The table as it was given, and with the layers that were found by use."""
        self._uses: tuple[Used, ...] = ()
        self._fallen, self._uncopied = dict[str, str](), set[str]()
        """Layers that have fallen back since, and parameters that are not to be copied."""
        self._generic: ExampleGradients | None = None
        self._modules: list[tuple[str, nn.Module]] | None = None
        self._prepared: weakref.ref[Batch] | None = None

    @contextmanager
    def session(self, settle: bool = True) -> Iterator["ModelRecorder"]:
        """Run models inside: hooks, buffers and random state are restored at the end.

        Checks are settled at the end, which synchronizes with the device; with ``settle=False`` the caller does that.
        """
        outer, modules = self._modules, list(self.model.named_modules())
        refuse_train_mode_batch_norm(modules)
        if outer is None:
            self.checks = Checks()  # none is left of a call that was interrupted
        self._modules = modules
        try:
            with undisturbed(self.model, [module for _, module in modules]):
                yield self
        except Exception:
            self.checks.settle()  # the cause may be a batch whose checks have not been read back yet
            raise
        finally:
            self._modules = outer
        if settle:
            self.checks.settle()

    def prepare(self, batch: Batch) -> Notes:
        """Check a batch, and examine the model if this is the first of its kind."""
        if self.findings is not None and (batch.part is not None or self._knows(batch)):
            return self.findings
        if not self._knows(batch):
            self._add_checks(batch)
        if self._modules is None:
            self.checks.settle()
        n = self._count(batch)
        if self.findings is None or (self._examined_on < 2 <= n):
            self._propose(batch, whole=False)
        assert self.findings is not None
        self._prepared = weakref.ref(batch)
        return self.findings

    def _propose(self, batch: Batch, whole: bool) -> None:
        """How the model has to be run, from some examples of a batch or from all."""
        found = examine(self.model, self._given, batch.x, batch.y, self.given_axis, self.checks.settle, whole)
        self._examined_on = example_count(batch.x, found.example_axis, found.shared)
        # What has once been found to fall back stays so: sums of several batches must be of one kind.
        self._adopt(found, {**found.reasons, **self._fallen})

    def _adopt(self, found: Notes, reasons: Mapping[str, str]) -> None:
        # Uses that were found once are kept, so that batches which differ do not change the table to and fro.
        taken = {part.name for used in self._uses for part in used.form.parts}
        self._uses += tuple(u for u in found.uses if not taken.intersection(part.name for part in u.form.parts))
        self._first_table = self._given.with_uses(self.model, self._uses)
        known = {spec.name for spec in self._first_table.layers}
        self._fallen = {name: why for name, why in reasons.items() if name in known}
        self.findings = found
        self.table = self._first_table.demote(self._fallen)
        bare = [name for spec in self.table.layers if not spec.sites for name in spec.parameters]
        copied = {name: axes for name, axes in found.copies.axes.items() if name in bare and name not in self._uncopied}
        self.findings = replace(found, copies=Copies(copied))
        names = [name for name in bare if name not in copied]
        self._generic = ExampleGradients(self.model, names, found.example_axis, found.shared) if names else None

    def _knows(self, batch: Batch) -> bool:
        return self._prepared is not None and self._prepared() is batch

    def check_batch(self, batch: Batch) -> None:
        """Device and finiteness of a batch, now."""
        self._add_checks(batch)
        self.checks.settle()

    def _add_checks(self, batch: Batch) -> None:
        named = self.model.named_modules() if self._modules is None else self._modules
        check_devices((m for _, m in named), (batch.x, batch.y if isinstance(batch.y, Tensor) else None))
        add_batch_checks(self.checks, batch)

    def check_output(self, f: Tensor, batch: Batch) -> None:
        """Finiteness of the model's output; inside a session it is read back when the checks are settled."""
        add_output_check(self.checks, f, batch.number)
        if self._modules is None:
            self.checks.settle()

    def seed_forward(self, batch: Batch) -> None:
        """Fix what a random forward (dropout) draws, by seed and batch: the same at every pass.

        Only inside `session`, which puts the generators back.
        """
        seed = stream(self.seed, "forward", batch.number).initial_seed()
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():  # torch.manual_seed would queue a call, and its traceback, until it is
            torch.cuda.manual_seed_all(seed)

    def examples(self, batch: Batch) -> int:
        """N of a batch."""
        self.prepare(batch)
        return self._count(batch)

    def _count(self, batch: Batch) -> int:
        found = self.findings
        if found is None:
            return example_count(batch.x, self.given_axis or 0)
        return example_count(batch.x, found.example_axis, found.shared)

    def likely_examples(self, batch: Batch) -> int:
        """N of a batch for a loss of the whole batch, which needs no examination: as found, given, or likely."""
        if self.findings is not None or self.given_axis is not None:
            return self._count(batch)
        return example_count(batch.x, likely_axes(batch.x, batch.y)[0])

    def arrange(self, n: int) -> Callable[[Tensor], Tensor]:
        """``[*lead, C] -> [N, *positions, C]`` for the model's output."""
        assert self.findings is not None
        layout = self.findings.output

        def front(t: Tensor) -> Tensor:
            lead = tuple(t.shape[:-1])
            fitting = layout if layout.fits(lead, n) or (n == 1 and layout.merged) else None
            if fitting is None and n == 1:
                fitting = Layout(0) if lead[:1] == (1,) else Layout(0, "major")
            if fitting is None:
                raise InputError(
                    describe(
                        f"an output (or target) with leading axes {lead}",
                        f"{n} examples on axis {layout.axis}",
                        "give one target an example, in the model's own layout",
                    )
                )
            return fitting.front(t, t.ndim - 1, n)

        return front

    def terms(self, f: Tensor, batch: Batch, likelihood: Reading, n: int, asked: Readback | None = None) -> Terms:
        """Output and target in standard form; `asked` is what the likelihood has asked before the forward."""
        asked = likelihood.ask(batch.y, batch.mask) if asked is None else asked
        standard = likelihood.standardize_asked(as_statistics(f), batch.y, batch.mask, self.arrange(n), asked)
        return standard if batch.part is None else replace(standard, part=batch.part)

    def record(
        self, batch: Batch, likelihood: Reading, batched: bool = False, explained: bool = False
    ) -> "RecordedBatch":
        """Run the model on a batch and bring its output to standard form.

        `batched` prepares for many cotangents at once, which fused attention cannot differentiate. `explained` says
        that cotangents will be pulled back for sure: what is to be checked at every batch is then checked with them.
        """
        self.prepare(batch)
        asked = likelihood.ask(batch.y, batch.mask)
        self.checks.send()
        kernels = [SDPBackend.MATH] if batched else ANY_BACKEND
        explained = explained and self.check == "always"
        tape, f, copies, n = self._run_verified(batch, kernels, explained)
        self.checks.read()  # sent before the forward, so this does not wait for the forward
        self.check_output(f, batch)
        with torch.enable_grad():
            terms = self.terms(f, batch, likelihood, n, asked)
        if terms.mask is not None and terms.f.requires_grad and tape.events:
            with sdpa_kernel(kernels):
                tape.aligned = self._aligned(batch, tape, terms.f, n)
        return RecordedBatch(self, tape, batch, likelihood, f, terms, n, copies, tuple(kernels), explained)

    # --- running and verifying ---------------------------------------------------------------------------

    def _run(self, batch: Batch, kernels: list[SDPBackend], plain: bool = False) -> "_Run":
        """A forward as proposed; `plain` with nothing in the place of parameters and inputs."""
        found = self.findings
        assert found is not None
        n = example_count(batch.x, found.example_axis, found.shared)
        refuse_empty(n)
        copies = {} if plain or not found.copies.axes else found.copies.make(self.model, n)
        tape = Tape(self.model, self.table, found.layouts, self.chunk_bytes, () if plain else found.broadcast, n)
        self.seed_forward(batch)
        with torch.enable_grad(), sdpa_kernel(kernels), substituted(self.model, copies), tape:
            f = call(self.model, batch.x)
        return _Run(tape, f, copies, n)

    def _run_verified(self, batch: Batch, kernels: list[SDPBackend], explained: bool) -> "_Run":
        """The same, proposed anew where the batch contradicts it: on all its examples, then without what failed."""
        training = any(module.training for module in self.model.modules())
        before = Snapshot([b for b in self.model.buffers() if b.device.type != "meta"] if training else [])
        for attempt in range(ATTEMPTS):
            assert self.findings is not None
            if attempt:
                before.put_back()  # a spectral norm moves its own in every forward
            try:
                run = self._run(batch, kernels)
            except Exception:
                if not self.findings.copies.axes and not self.findings.broadcast:
                    raise  # the model's own
                self._again(batch, attempt, Verification({}, mixed=tuple(self.findings.copies.axes)))
                continue
            with sdpa_kernel(kernels):
                layouts, failed = self._verified(batch, run, kernels, explained)
            if failed is None:
                run.tape.keep_layouts(layouts)
                return run
            self._again(batch, attempt, failed)
        raise AssertionError("unreachable: nothing is left that could fail")

    def _again(self, batch: Batch, attempt: int, verification: Verification) -> None:
        """Propose anew: by looking at all examples, later by leaving out what failed."""
        assert self.findings is not None
        if attempt == 0:
            self._propose(batch, whole=True)
            return
        failed = dict.fromkeys(specs_at(self.table, verification.lost), NO_AXIS) | dict(verification.reasons)
        self._uncopied.update(verification.mixed)
        notes = replace(self.findings, broadcast=frozenset()) if attempt > 1 else self.findings
        self._adopt(notes, {**self._fallen, **failed})

    def _verified(
        self, batch: Batch, run: "_Run", kernels: list[SDPBackend], explained: bool
    ) -> tuple[Mapping[int, Layout], Verification | None]:
        """Where the examples are in every call of a forward, and what is wrong with it (None: nothing).

        A graph that has been verified before is not verified again.
        """
        found, (tape, f, copies, n) = self.findings, run
        assert found is not None
        if not f.requires_grad or self.check == "never":
            return {}, None
        graph = Graph.of(f)
        tape.forget_unreached(graph.places)
        known = _VERIFIED.setdefault(self.model, {})
        names = {**parameter_names(self.model.named_parameters()), **{id(t): k for k, t in copies.items()}}
        sizes = tuple((t.shape, t.dtype) for t in leaves(batch.x))
        key = (graph.key(names), sizes, n, found.output, found.broadcast, self._recorded(tape))
        steady = graph.steady and (self.check == "first" or explained)
        if steady and key in known:
            return known[key], None
        verification = verify(tape, f, found.output, n, copies)
        if (copies or found.broadcast) and verification.right:
            verification = self._compared(batch, kernels, run, verification)
        if steady and verification.right and verification.conclusive and self._covers(tape, graph, copies):
            if len(known) >= MOST_GRAPHS:
                known.pop(next(iter(known)))
            known[key] = verification.layouts
        return verification.layouts, None if verification.right else verification

    def forget(self) -> None:
        """What has been verified of this model: every graph is a new one."""
        _VERIFIED.pop(self.model, None)

    def _aligned(self, batch: Batch, tape: Tape, f: Tensor, n: int) -> frozenset[int]:
        """Calls for which a mask of the output's positions holds, by the graph where that is known."""
        known = _ALIGNED.setdefault(self.model, {})
        graph = Graph.of(f)
        sizes = tuple((t.shape, t.dtype) for t in leaves(batch.x))
        key = (graph.key(parameter_names(self.model.named_parameters())), sizes, n, self._recorded(tape))
        if key not in known:
            found = aligned_calls(tape, f)
            if not graph.steady or self.check == "always":
                return found
            if len(known) >= MOST_GRAPHS:
                known.pop(next(iter(known)))
            known[key] = found
        return known[key]

    def _recorded(self, tape: Tape) -> object:
        """What is in the table and what of it falls back, and which calls were recorded: a module's, or all products
        with its weight."""
        calls = tuple((*event.key, event.site.used is not None) for event in tape.events)
        return tuple((spec.name, bool(spec.sites)) for spec in self.table.layers), calls

    def _covers(self, tape: Tape, graph: Graph, copies: Mapping[str, Tensor]) -> bool:
        """Whether recorded calls are what their rules say, and copies are used once, whatever values they have.

        A forward of a subclass may scale its weight by ones, and a gate of zero hide what is done with a copy: these
        are verified at every batch.
        """
        uses = graph.uses()
        own = all(event.site.own_forward for event in tape.events)
        return own and all(uses[id(copy)] <= 1 for copy in copies.values())

    def _compared(
        self, batch: Batch, kernels: list[SDPBackend], run: "_Run", verification: Verification
    ) -> Verification:
        """Whether the output and the gradients of copied parameters are those of the model as it is."""
        with undisturbed(self.model):
            plain = self._run(batch, kernels, plain=True)
        own = tolerance(run.f.dtype)
        if plain.f.shape != run.f.shape or not torch.allclose(plain.f, run.f, rtol=1e-2 * own + 1e-6, atol=1e-6):
            lost = self.findings.broadcast if self.findings is not None else ()
            return replace(verification, mixed=tuple(run.copies), lost=tuple(lost))
        params = [dict(self.model.named_parameters())[name] for name in run.copies]
        if not params:
            return verification
        with plain.tape.replaying():
            grads = torch.autograd.grad(plain.f, params, noise(plain.f), allow_unused=True)
        wrong = []
        for name, p, g in zip(run.copies, params, grads, strict=True):
            mine = verification.truth[name]
            truth = p.new_zeros(p.shape) if g is None else g
            gap = truth if mine is None else mine.reshape(p.shape) - truth
            if float(gap.double().norm()) > own * float(truth.double().norm()):
                wrong.append(name)
        return replace(verification, mixed=tuple(wrong))


class _Run(NamedTuple):
    """A forward under a tape."""

    tape: Tape
    f: Tensor
    copies: dict[str, Tensor]
    examples: int


ATTEMPTS = 6
MOST_GRAPHS = 256
"""Verified graphs that are remembered of each model."""
_ALIGNED: "weakref.WeakKeyDictionary[nn.Module, dict[object, frozenset[int]]]" = weakref.WeakKeyDictionary()
_VERIFIED: "weakref.WeakKeyDictionary[nn.Module, dict[object, Mapping[int, Layout]]]" = weakref.WeakKeyDictionary()

ANY_BACKEND = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class RecordedBatch:
    """A batch that was run: terms at the output, and the way back to every layer."""

    recorder: ModelRecorder
    tape: Tape
    batch: Batch
    likelihood: Reading
    f: Tensor
    """The output as the model gave it."""
    terms: Terms
    examples: int
    copies: Mapping[str, Tensor]
    kernels: tuple[SDPBackend, ...]
    """What attention may use, also where a checkpoint runs it again in the backward."""
    explained: bool = False
    """Whether gradients that are pulled back are compared with autograd's."""

    def output_bytes(self) -> int:
        """What the gradients of all recorded outputs take, for one cotangent."""
        return sum(event.out_shape.numel() * event.out_dtype.itemsize for event in self.tape.events)

    def each_layer(self, v: Tensor, consume: Callable[[LayerSpec, LayerIO], None], last: bool) -> None:
        """Pull cotangents [V, N, S, C] back and hand over every layer; `last` frees the graph."""
        if self.f.requires_grad:  # else no trainable parameter takes part in this batch
            with sdpa_kernel(list(self.kernels)), self.tape.replaying():
                self._each_layer(v, consume, last)

    def _each_layer(self, v: Tensor, consume: Callable[[LayerSpec, LayerIO], None], last: bool) -> None:
        generic = self.recorder._generic
        if generic is not None:
            self._each_generic(generic, v, consume)
        f, mask, leaves = self.terms.f, self.terms.mask, list(self.copies.values())
        self.tape.kept = self.terms.kept
        check = Explanation(self.tape, v, self.batch.number) if self.explained else None
        consume_rows = consume if check is None else check.checking(consume)
        of_params: list[Tensor | None] = []
        if v.shape[0] == 1:
            more = [] if check is None else list(check.params.values())
            grads = self.tape.stream(f, v[0], consume_rows, not last, mask, [*leaves, *more])
            grads, of_params = (
                [None if g is None else g.unsqueeze(0) for g in grads[: len(leaves)]],
                grads[len(leaves) :],
            )
        else:
            of_params = [] if check is None else check.plain_gradients(f)
            ios, grads = self.tape.pull_beside(f, v, leaves, not last, mask)
            for name, io in ios.items():
                consume_rows(self.recorder.table.spec(name), io)
        if check is not None:
            check.settle(of_params, self.recorder.checks, self.recorder.forget)
        if self.copies:
            self._each_copy(dict(zip(self.copies, grads, strict=True)), v, consume)

    def _each_copy(
        self, grads: Mapping[str, Tensor | None], v: Tensor, consume: Callable[[LayerSpec, LayerIO], None]
    ) -> None:
        for spec in self.recorder.table.layers:
            name = spec.parameters[0]
            grad = None if spec.sites else grads.get(name)
            if grad is not None:
                rows = Copies.rows(grad, self.recorder.table.shapes[name])
                consume(spec, GradientIO(spec, spec.form.join({name: rows}).to(v.dtype)))

    def all_layers(self, v: Tensor, last: bool) -> dict[str, LayerIO]:
        """The same, all layers at once; layers that were not called are absent."""
        found: dict[str, LayerIO] = {}
        self.each_layer(v, lambda spec, io: found.__setitem__(spec.name, io), last)
        return found

    def _each_generic(
        self, generic: ExampleGradients, v: Tensor, consume: Callable[[LayerSpec, LayerIO], None]
    ) -> None:
        def standard(out: Tensor) -> Tensor:
            return self._standard_alone(out)

        rows = generic.rows(self.batch.x, self.terms.f, v, standard)
        for spec in self.recorder.table.layers:
            if not spec.sites and spec.parameters[0] in rows:
                blocks = spec.form.join({name: rows[name] for name in spec.parameters})
                consume(spec, GradientIO(spec, blocks.to(v.dtype)))

    def _standard_alone(self, out: Tensor) -> Tensor:
        """One example's output in standard form, without its target."""
        read = self.likelihood.alone(as_statistics(out), self.recorder.arrange(1))
        if read is not None:
            return read
        s, c = self.terms.f.shape[1:]
        axis = self._class_axis(out)
        moved = as_statistics(out).movedim(axis, -1)
        return self.recorder.arrange(1)(moved).reshape(1, s, c)

    def _class_axis(self, out: Tensor) -> int:
        axis = getattr(self.likelihood, "class_axis", None)
        if axis is not None:
            return axis
        c, positions = self.terms.f.shape[-1], self.terms.positions
        last = out.shape[-1] == c and tuple(out.shape[1:-1]) == positions
        return -1 if last or out.ndim < 3 or out.shape[1] != c else 1
