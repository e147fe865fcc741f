"""`doctor`: the order of an examination."""

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.doctor.batches import PIECE, Streamed, halves, joined
from layerwise.doctor.clock import Clock
from layerwise.doctor.conditions import calibrated, evaluating, trainable
from layerwise.doctor.findings import ordered
from layerwise.doctor.measure.activations import ActivationWatch, first_broken, run_watched
from layerwise.doctor.measure.kernel_alignment import ROWS, measure_alignment
from layerwise.doctor.measure.layer_sums import LayerSums, affordable_spectrum
from layerwise.doctor.measure.steps import MEMBERS, Line, measure_own_step, measure_steps
from layerwise.doctor.measure.targets import TargetSums, measure_inputs
from layerwise.doctor.measurements import Layer, Measurements, OwnStep, Signal, Step
from layerwise.doctor.report import Report
from layerwise.doctor.rules import all_findings
from layerwise.foundations import likelihoods
from layerwise.foundations.cotangents import LossGradient, SampledLabels
from layerwise.foundations.device import budget
from layerwise.foundations.errors import InputError, LayerwiseError, describe
from layerwise.foundations.likelihoods import Likelihood
from layerwise.foundations.random import seed_of
from layerwise.foundations.types import Tree, leaves, statistics_dtype, unwrap
from layerwise.layers.capture.model_call import call, in_own_arithmetic, undisturbed
from layerwise.layers.capture.recorder import Batch, ModelRecorder, RecordedBatch
from layerwise.layers.capture.source import Source, Sweep, Totals
from layerwise.layers.io.layer_io import LayerIO
from layerwise.layers.table import LayerSpec, LayerTable

LAYERS_SHARE, SPECTRA_SHARE, KERNEL_SHARE, STEPS_SHARE = 0.35, 0.15, 0.6, 0.9
"""Parts of the time after which layers, kernels and steps begin nothing new; of spectra, the part that they take."""
LAYER_PASS = 40
"""Forwards that the pass over layers takes, roughly, for the first batch."""
GLANCE = 512
"""Examples that are run before anything else."""
WATCHED = 4
"""Batches whose activations are watched."""


def doctor(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    seconds: int | float = 60,
    memory: int | float | None = None,
    members: Sequence[str] = MEMBERS,
    example_axis: int | None = None,
    seed: int | torch.Generator = 0,
    **likelihood_options: Any,
) -> Report:
    """What holds training back: measurements of every layer, and findings with evidence and what would help.

    >>> import torch, layerwise as lw
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    >>> x = torch.randn(256, 8)
    >>> report = lw.doctor(model, (x * 1000, x[:, :3].argmax(1)), members=["SGD", "KFAC"])
    >>> report.findings[0].kind
    'input-scale'

    ``print(report)`` shows tables and sentences, ``report.save_html(path)`` a page, ``report.to_json()`` everything.
    Model, optimizer and random state are left as they were. The model is examined in eval mode; batch norm in train
    mode is given the statistics of the data meanwhile.

    Args:
        model: any module, as it is in training: initialised, or in the middle of it.
        data: a batch ``(x, y)``, or an iterable of batches. Batches are streamed until the data, or a third of the
            time, is used up; the report says how many there were.
        likelihood: as for `lw.fisher`; by default "categorical" for integer targets, "gaussian" for others.
        optimizer: the optimizer of your loop, with its rate and state: its next step is judged as well.
        seconds: how long the examination should take, at most. What there was no time for is named in the report. A
            single batch is always finished.
        memory: bytes that it may use; default half of what is free.
        members: optimizers of `lw.optim` whose steps are compared; each is given a copy of the model.
        example_axis: axis of the examples in the input, where it should not be found.
        seed: of drawn labels, orders and shuffles.
        likelihood_options: `weight`, `ignore_index`, … of the likelihood named.
    """
    clock = Clock(float(seconds))
    model = unwrap(model)
    unknown = [name for name in members if name not in MEMBERS]
    if unknown:
        raise InputError(
            describe(f"members={list(members)}", f"some of {', '.join(MEMBERS)}", f"leave out {unknown[0]!r}")
        )
    examination = Examination(
        model, data, likelihood, likelihood_options, optimizer, clock, memory, example_axis, seed_of(seed)
    )
    measured = examination.measured(tuple(members))
    return Report(measured, list(ordered(all_findings(measured))), clock.elapsed(), float(seconds))


class Examination:
    """One model on one set of data."""

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        likelihood: str | Likelihood | None,
        options: dict[str, Any],
        optimizer: torch.optim.Optimizer | None,
        clock: Clock,
        memory: int | float | None,
        example_axis: int | None,
        seed: int,
    ) -> None:
        self.model, self.optimizer, self.clock, self.seed, self.axis = model, optimizer, clock, seed, example_axis
        parameter = next(iter(model.parameters()), None)
        if parameter is None:
            raise InputError(describe("a model without parameters", "a model that can be trained", "check the model"))
        self.device, self.dtype = parameter.device, statistics_dtype(parameter.dtype)
        self.memory = budget(memory, self.device)
        source = Source(data, False, model)
        if not source.single and not source.can_repeat:
            self.first, self.data = _peeked(source.data, model)
        else:
            self.first, self.data = next(Source(data, False, model).batches("first look")), data
        self.glance = _spread(self.first.x, example_axis)
        """What is run before anything is known of the model: the first batch, or some of its examples."""
        self.law, self.likelihood_note = _likelihood(likelihood, self.first.y, options)
        self.notes: list[str] = [self.likelihood_note] if self.likelihood_note else []

    @in_own_arithmetic
    def measured(self, members: tuple[str, ...]) -> Measurements:
        """All measurements, those that explain the others first."""
        trained = [name for name, p in self.model.named_parameters() if p.requires_grad]
        with calibrated(self.model, self._run_first) as norms, evaluating(self.model):
            if norms:
                self.notes.append(f"{norms} batch norm layers were given the statistics of the data.")
            watch, forward = self._watched()
            signals = watch.measured_signals(self.model)
            broken, examples = first_broken(signals), _broken_examples(self.first)
            if broken or examples:
                return self._broken(watch, broken, examples, trained)
            with trainable(self.model) as frozen:
                recorder = ModelRecorder(self.model, LayerTable.from_model(self.model), self.axis, seed=self.seed)
                stream = Streamed(
                    self.data, recorder, self._more, self.seed, self.memory, self._piece(recorder, forward)
                )
                seen = self._seen(recorder, stream)
                self.clock.book("layers")
                with undisturbed(self.model):
                    for batch in stream.kept[1:WATCHED]:
                        run_watched(self.model, watch, call, batch.x)
                self.clock.book("activations")
            if stream.stopped:
                self.notes.append(f"Time allowed for {stream.seen} examples of the data; the rest was not looked at.")
            layers = self._layers(recorder.table, seen, set(frozen), signals)
            self.clock.book("spectra")
            aligned = self._alignment(recorder, stream.kept) if trained else None
            self.clock.book("kernel")
            steps, own = self._steps(recorder, stream.kept, members, trained, bool(frozen))
            self.clock.book("steps")
        targets = seen.targets.measured(self.law.name)
        if aligned is not None:
            targets = dataclasses.replace(targets, shuffled_z=aligned.shuffled_z)
            layers = tuple(dataclasses.replace(layer, alignment=aligned.layers.get(layer.name)) for layer in layers)
        reached = {name for layer in layers if layer.gradient_norm > 0 for name in layer.parameters}
        convolutional = any(signal.kind.startswith("Conv1d") and signal.place <= 1 for signal in signals)
        loss, loss_se = seen.loss()
        return Measurements(
            loss=loss,
            loss_se=loss_se,
            likelihood=self.law.name,
            examples=stream.seen,
            batches=seen.totals.batches,
            parameters=sum(p.numel() for p in self.model.parameters()),
            layers=layers,
            sites=watch.measured_sites(),
            attention=watch.measured_attention(),
            signals=watch.measured_signals(self.model),
            inputs=_inputs([batch.x for batch in stream.kept], convolutional),
            targets=targets,
            steps=steps,
            own_step=own,
            frozen=frozen,
            unused=tuple(name for name, _ in self.model.named_parameters() if name not in reached),
            notes=tuple(self.notes),
            seconds=dict(self.clock.spent),
        )

    # --- parts ---------------------------------------------------------------------------------------------------

    def _run_first(self) -> None:
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            call(self.model, self.glance)

    def _watched(self) -> tuple[ActivationWatch, float]:
        """The first batch, or the beginning of it, under the watch; and the seconds of one example's forward."""
        watch = ActivationWatch()
        if self.device.type == "cuda":  # a first forward loads libraries, and says nothing of the next one's time
            self._run_first()
        n = max(1, next((len(t) for t in leaves(self.glance) if t.ndim), 1))
        with undisturbed(self.model):
            start = time.perf_counter()
            run_watched(self.model, watch, call, self.glance)
            each = (time.perf_counter() - start) / n
        self.clock.book("activations")
        return watch, each

    def _more(self) -> bool:
        """Whether another batch may begin."""
        return self.clock.has(LAYERS_SHARE)

    def _piece(self, recorder: ModelRecorder, forward: float) -> int:
        """Examples that the pass over layers can take at once in its part of the time, 4 at least."""
        with recorder.session():
            recorder.prepare(self.first)
        left = LAYERS_SHARE * self.clock.seconds - self.clock.elapsed()
        return max(4, min(PIECE, int(left / (LAYER_PASS * max(forward, 1e-9)))))

    def _broken(
        self, watch: ActivationWatch, broken: tuple[str, ...], examples: int, trained: Sequence[str]
    ) -> Measurements:
        """What can be said where the output, or the data, is not finite."""
        frozen = tuple(name for name, _ in self.model.named_parameters() if name not in trained)
        return Measurements(
            loss=math.nan,
            loss_se=math.nan,
            likelihood=self.law.name,
            examples=0,
            batches=0,
            parameters=sum(p.numel() for p in self.model.parameters()),
            layers=(),
            sites=watch.measured_sites(),
            signals=watch.measured_signals(self.model),
            inputs=None if examples else _inputs([self.first.x], False),
            frozen=frozen,
            broken=broken,
            broken_examples=examples,
            notes=(
                *self.notes,
                f"{'The data' if examples else 'The output'} is not finite: nothing else was measured.",
            ),
            seconds=dict(self.clock.spent),
        )

    def _seen(self, recorder: ModelRecorder, stream: Streamed) -> "Seen":
        """The pass over the data: two backward passes a batch, with the data's labels and with drawn ones."""
        sums: dict[str, LayerSums] = {}
        targets, losses = TargetSums(), list[tuple[float, float]]()
        drawn, given = SampledLabels(self.law, 1, self.seed), LossGradient(self.law)

        def of(spec: LayerSpec) -> LayerSums:
            known = sums.get(spec.name)
            if known is None or known.spec.form != spec.form:  # a later batch has shown that the layer falls back
                sums[spec.name] = known = LayerSums(spec, self.device, self.dtype, place=len(sums))
            return known

        def visit(recorded: RecordedBatch) -> None:
            number = recorded.batch.number
            targets.add(recorded.terms)
            per_example = self.law.loss(recorded.terms).detach().sum(1)
            losses.extend(zip(per_example.tolist(), recorded.terms.weight.sum(1).tolist(), strict=True))
            pairs = number == 0 or self._more()  # a first batch is finished whatever the time

            def gradient(spec: LayerSpec, io: LayerIO) -> None:
                of(spec).add_gradient(io, number)

            def curvature(spec: LayerSpec, io: LayerIO) -> None:
                of(spec).add_curvature(io, number, pairs)

            recorded.each_layer(given.slice(recorded.terms, 0, 1, number).detach(), gradient, False)
            recorded.each_layer(drawn.slice(recorded.terms, 0, 1, number).detach(), curvature, True)

        totals = Sweep(recorder, stream, self.law, given, self.memory, "terms").visit(visit, "doctor")
        return Seen(sums, targets, tuple(losses), totals)

    def _layers(
        self, table: LayerTable, seen: "Seen", frozen: set[str], signals: Sequence[Signal]
    ) -> tuple[Layer, ...]:
        """What the sums say of each layer."""
        sums, terms, (loss, _) = seen.sums, max(float(seen.totals.terms), 1e-300), seen.loss()
        factored = [one.spec for one in sums.values() if one.kronecker]
        allowed = max(min(SPECTRA_SHARE * self.clock.seconds, self.clock.left() / 2), 0.5)
        largest = affordable_spectrum(factored, allowed, self.device)
        if largest < max((max(spec.form.shape[1:]) for spec in factored if not spec.form.one_hot), default=0):
            self.notes.append(f"Spectra of layers with more features are those of {largest} of them.")
        called = {signal.module: signal.place for signal in signals}
        curvature = sum(one.fisher_trace for one in sums.values()) or 1.0
        params = dict(self.model.named_parameters())
        found = []
        # In the order of the forward; a backward hands layers over from the output to the input.
        places = {name: called.get(_module(one.spec), 10**6 - one.place) for name, one in sums.items()}
        ranks = {name: rank for rank, (name, _) in enumerate(sorted(places.items(), key=lambda pair: pair[1]))}
        for spec in table.layers:
            one = sums.get(spec.name)
            if one is None:
                one = LayerSums(spec, self.device, self.dtype)
            one.largest_spectrum = largest
            inputs, outgrads = one.sides()
            error, error_se = one.kronecker_error()
            reach, left = one.reach(terms)
            reach = min(reach, loss) if loss > 0 else reach
            grad = one.gradient(terms)
            weights = torch.cat([params[name].detach().reshape(-1) for name in spec.parameters])
            found.append(
                Layer(
                    spec.name,
                    spec.kind,
                    spec.form.shape,
                    spec.form.numel(),
                    not any(name in frozen for name in spec.parameters),
                    ranks.get(spec.name, -1),
                    spec.parameters,
                    float(weights.double().square().mean().sqrt()),
                    0.0 if grad is None else float(grad.norm()),
                    one.gradient_top_share(),
                    one.noise_scale(),
                    one.fisher_trace / curvature,
                    inputs,
                    outgrads,
                    error,
                    error_se,
                    reach,
                    left,
                )
            )
        return tuple(found)

    def _alignment(self, recorder: ModelRecorder, kept: Sequence[Batch]) -> Any:
        if not self.clock.has(KERNEL_SHARE):
            self.notes.append("No time for the tangent kernel's alignment.")
            return None
        outputs = self._outputs(recorder, kept[0])
        batch = joined(list(kept), recorder, max(ROWS // outputs, 1))
        n = recorder.examples(batch)
        with undisturbed(self.model), torch.no_grad():
            recorder.seed_forward(batch)
            terms = recorder.terms(call(self.model, batch.x), batch, self.law, n)
        # Functions cost a backward pass each: as many as the layers' pass, which made two, leaves time for.
        each = max(self.clock.spent.get("layers", 0.0) / 2, 1e-6) / max(1, len(kept))
        allowed = max(1, int((KERNEL_SHARE * self.clock.seconds - self.clock.elapsed()) / (4 * each)))
        functions = max(1, min(outputs, allowed, max(ROWS // n, 4)))
        found = measure_alignment(self.model, batch.x, terms, n, functions, self.seed, self.memory)
        if found is not None and found.note:
            self.notes.append(found.note)
        elif found is not None and functions < outputs:
            self.notes.append(
                f"Kernels are of {functions} random signed sums of the {outputs} outputs, on {n} examples."
            )
        return found

    def _outputs(self, recorder: ModelRecorder, batch: Batch) -> int:
        """Numbers in the output of one example."""
        with undisturbed(self.model), torch.no_grad():
            terms = recorder.terms(call(self.model, batch.x), batch, self.law, recorder.examples(batch))
        return math.prod(terms.f.shape[1:])

    def _steps(
        self, recorder: ModelRecorder, kept: list[Batch], members: tuple[str, ...], trained: Sequence[str], frozen: bool
    ) -> tuple[tuple[Step, ...], OwnStep | None]:
        if not trained:
            return (), None
        if frozen:  # steps move what is trained alone
            recorder = ModelRecorder(self.model, LayerTable.from_model(self.model), self.axis, seed=self.seed)
            with recorder.session():
                recorder.prepare(kept[0])
        training, judging = halves(kept, recorder)
        line = Line(self.model, recorder, self.law, judging)
        own = None if self.optimizer is None else self._own_step(line, training, trained)
        steps, notes = measure_steps(line, training, self.clock, STEPS_SHARE, members)
        if members and not steps and not notes:
            self.notes.append(
                "No step that is made of one half of the examples lowers the loss of the other half, as it is where a "
                "model has nearly fitted them: steps are judged on the examples that they come from."
            )
            line = dataclasses.replace(line, batches=kept)
            steps, notes = measure_steps(line, kept, self.clock, STEPS_SHARE, members)
        self.notes += notes
        return steps, own

    def _own_step(self, line: Line, training: list[Batch], trained: Sequence[str]) -> OwnStep | None:
        assert self.optimizer is not None
        try:
            return measure_own_step(line, training, self.optimizer, trained)
        except (LayerwiseError, RuntimeError, TypeError) as error:
            self.notes.append(f"The step of the given optimizer was not measured: {error}")
            return None


@dataclass(frozen=True, eq=False)
class Seen:
    """What the pass over the data leaves."""

    sums: dict[str, LayerSums]
    targets: TargetSums
    losses: tuple[tuple[float, float], ...]
    """Of every example: loss summed over its terms, and their weight."""
    totals: Totals

    def loss(self) -> tuple[float, float]:
        """The mean over terms, and its standard error over examples."""
        total, weight = torch.tensor(self.losses, dtype=torch.float64).reshape(-1, 2).unbind(1)
        mean = float(total.sum() / weight.sum().clamp_min(1e-300))
        if len(total) < 2:
            return mean, math.nan
        spread = float((total - mean * weight).std()) * len(total) ** 0.5
        return mean, spread / float(weight.sum().clamp_min(1e-300))


def _spread(x: Tree, axis: int | None) -> Tree:
    """Some examples from all over a batch that is a large tensor, other batches as they are."""
    if not isinstance(x, Tensor) or axis not in (None, 0) or x.ndim < 2 or len(x) <= GLANCE:
        return x
    return x[torch.linspace(0, len(x) - 1, GLANCE, device=x.device).long()]


def _broken_examples(batch: Batch) -> int:
    """Examples of a batch, along the first axis of its tensors, with values that are NaN or infinite."""
    tensors = [t for t in leaves((batch.x, batch.y)) if t.is_floating_point() and t.ndim]
    return max((int((~torch.isfinite(t)).reshape(len(t), -1).any(1).sum()) for t in tensors if t.numel()), default=0)


def _module(spec: LayerSpec) -> str:
    """The module that a block of parameters belongs to."""
    return spec.sites[0].module_name if spec.sites else spec.parameters[0].rpartition(".")[0]


def _peeked(data: Any, model: nn.Module) -> tuple[Batch, Any]:
    """The first batch of a generator, and all of its batches."""
    rest = iter(data)
    items = list(itertools.islice(rest, 1))
    first = next(Source(items, False, model).batches("first look"))
    return first, itertools.chain(items, rest)


def _likelihood(given: str | Likelihood | None, y: object, options: dict[str, Any]) -> tuple[Likelihood, str]:
    if given is not None:
        return likelihoods.resolve(given, **options), ""
    if y is None:
        raise InputError(describe("a batch without a target", "a batch (x, y)", "give y"))
    name = "gaussian" if isinstance(y, Tensor) and y.is_floating_point() else "categorical"
    return likelihoods.resolve(name, **options), f'likelihood "{name}", by the type of the targets.'


def _inputs(x: Sequence[Any], convolutional: bool) -> Any:
    """Of the tensors that the batches have in common."""
    if all(isinstance(one, Tensor) for one in x) and len({tuple(one.shape[1:]) for one in x}) == 1:
        return measure_inputs(torch.cat(list(x)), convolutional)
    return measure_inputs(x[0], convolutional)
