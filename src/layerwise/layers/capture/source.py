"""Going over the data: `Source` gives batches, `Sweep` runs the model on them and hands every layer over.

Data is a pair ``(x, y)``, or any iterable of pairs such as a `DataLoader`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.foundations.cotangents import Cotangent, HessianRoot, OutputBasis
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.likelihoods import Likelihood
from layerwise.foundations.progress import Progress, resolve
from layerwise.foundations.types import leaves, map_leaves
from layerwise.layers.capture.model_call import example_count, take
from layerwise.layers.capture.recorder import Batch, ModelRecorder, RecordedBatch
from layerwise.layers.io.layer_io import LayerIO
from layerwise.layers.table import LayerSpec

COTANGENT_BYTES = 256 * 2**20
"""Gradients of all layers that are pulled back at once take about this much, or less under `memory`."""
GRAPH_FACTOR = 3
"""A forward keeps about this many times the recorded inputs and outputs."""
IGNORED = -100
"""The label of positions that do not count, as in torch."""
_LABEL_KEYS = ("labels", "label", "y", "target", "targets")


def is_batch(data: Any) -> bool:
    """Whether `data` is one batch rather than an iterable of batches."""
    if isinstance(data, Tensor | Mapping):
        return True
    if not isinstance(data, tuple | list) or not 1 <= len(data) <= 3:
        return False
    first, *rest = data
    has_input = isinstance(first, Tensor) or (rest and next(leaves(first), None) is not None)
    return bool(has_input) and all(r is None or isinstance(r, Tensor) for r in rest)


def as_batch(item: Any, number: int, model: nn.Module | None = None) -> Batch:
    """One batch: ``(x, y)``, ``(x, y, mask)``, ``[x]``, a tensor, or a mapping with its labels among the keys.

    Labels among the keys are read as the loss of `model` reads them.
    """
    if isinstance(item, Tensor):
        return Batch(item, None, None, number)
    if isinstance(item, Mapping):
        key = next((k for k in _LABEL_KEYS if k in item), None)
        inputs = {k: v for k, v in item.items() if k != key}
        labels = None if key is None else item[key]
        if key == "labels" and model is not None:
            inputs, labels = inputs_and_targets(model, inputs, labels)
        return Batch(inputs, labels, None, number)
    if isinstance(item, tuple | list) and 1 <= len(item) <= 3:
        x, y, mask = (*item, None, None)[:3]
        if next(leaves(x), None) is not None:
            return Batch(x, y, mask, number)
    raise InputError(
        describe(
            f"batch {number} of type {type(item).__name__}",
            "(x, y), (x, y, mask), or a mapping with labels",
            "check what the loader yields",
        )
    )


def inputs_and_targets(model: nn.Module, inputs: Mapping[str, Any], labels: Any) -> tuple[dict[str, Any], Any]:
    """Labels among keyword arguments, as Hugging Face's collators give them, read as the model's own loss reads them.

    Returns what the model is called with, and one target for each position of its output.

    A causal language model's loss compares position t with label t + 1, so labels are shifted. An encoder–decoder model
    makes the decoder's inputs of the labels where it gets none: these are made here, since labels are not passed on.
    """
    config = getattr(model, "config", None)
    if config is None or not isinstance(labels, Tensor) or labels.ndim < 2 or labels.is_floating_point():
        return dict(inputs), labels
    if getattr(config, "is_encoder_decoder", False):
        if any(name in inputs for name in ("decoder_input_ids", "decoder_inputs_embeds")):
            return dict(inputs), labels
        return {**inputs, "decoder_input_ids": _decoder_inputs(config, labels)}, labels
    # Of another model than Hugging Face's, `loss_function` is nothing or something else.
    if getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss":
        return dict(inputs), F.pad(labels[..., 1:], (0, 1), value=IGNORED)
    return dict(inputs), labels


def _decoder_inputs(config: Any, labels: Tensor) -> Tensor:
    """The labels one position later, after the token that starts a sequence."""
    start = config.decoder_start_token_id
    shifted = F.pad(labels[..., :-1], (1, 0), value=config.bos_token_id if start is None else start)
    return shifted.masked_fill(shifted == IGNORED, config.pad_token_id or 0)


class Source:
    """The data, iterated as often as a structure needs; later passes must see the same batches."""

    def __init__(self, data: Any, progress: bool | Progress | None = False, model: nn.Module | None = None) -> None:
        self.model, self.progress = model, progress
        if data is None:
            raise InputError(describe("data=None", "a batch (x, y) or an iterable of batches", "give the data"))
        self.single = is_batch(data)
        self.data: Iterable[Any] = [data] if self.single else data
        if not self.single and not isinstance(data, Iterable):
            raise InputError(
                describe(
                    f"data of type {type(data).__name__}",
                    "a batch (x, y) or an iterable of batches",
                    "wrap it",
                )
            )
        self.passes = 0
        self.repeats = False
        """Whether later passes will come, which must see the same batches."""
        self._seen: list[float] = []

    @property
    def can_repeat(self) -> bool:
        """Whether the data can be iterated again (a generator cannot)."""
        return not isinstance(self.data, Iterator)

    def require_passes(self, count: int, why: str) -> None:
        """Refuse a generator where more than one pass is needed."""
        self.repeats = self.repeats or count > 1
        if count > 1 and not self.can_repeat:
            raise InputError(
                describe(
                    f"a generator ({type(self.data).__name__}) for {why}",
                    f"data that can be iterated {count} times",
                    "pass a DataLoader or a list of batches",
                )
            )

    def restart(self, why: str) -> None:
        """Begin anew with a pass that could not be finished."""
        if not self.can_repeat:
            raise InputError(
                describe(
                    f"a generator ({type(self.data).__name__}) {why}",
                    "data that can be iterated again, or a larger first batch",
                    "pass a DataLoader or a list of batches, or put the small batch last",
                )
            )
        self._seen.clear()

    def batches(self, description: str) -> Iterator[Batch]:
        """All batches of one pass."""
        total = len(self.data) if hasattr(self.data, "__len__") else None  # type: ignore[arg-type]
        number = -1
        shown = self.data if self.single else resolve(self.progress).track(self.data, description, total)
        for number, item in enumerate(shown):
            batch = as_batch(map_leaves(usable, item), number, self.model)
            self._check_same(batch)
            yield batch
        if number < 0:
            raise InputError(describe("data without a single batch", "at least one batch", "check the loader"))
        if self.repeats and self.passes and not self.single and number + 1 < len(self._seen):
            self._differs(number + 1)
        self.passes += 1

    def _check_same(self, batch: Batch) -> None:
        if self.single or not self.repeats:
            return
        tensors = (t.detach() for t in leaves((batch.x, batch.y)) if t.device.type != "meta")
        mark = sum(_mark(t) for t in tensors)
        if self.passes == 0:
            self._seen.append(mark)
            return
        if batch.number >= len(self._seen) or not _close(mark, self._seen[batch.number]):
            self._differs(batch.number)

    @staticmethod
    def _differs(number: int) -> None:
        raise InputError(
            describe(
                f"a loader whose batch {number} differs from the earlier pass",
                "the same batches in the same order at every pass",
                "use shuffle=False and no random augmentation, or pass a list of batches",
            )
        )


def _mark(t: Tensor) -> float:
    """A number that tells batches apart, also by the order of their rows."""
    if t.ndim == 0 or not t.numel():
        return float(t.sum(dtype=torch.float64))
    rows = t.flatten(1).sum(1, dtype=torch.float64) if t.ndim > 1 else t.double()
    return float(rows @ torch.linspace(1, 2, len(rows), dtype=torch.float64, device=t.device))


def usable(t: Tensor) -> Tensor:
    """A tensor that autograd may keep: not one made in inference mode."""
    return t.clone() if t.is_inference() else t


def _close(a: float, b: float) -> bool:
    if a != a and b != b:
        return True
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b), torch.finfo(torch.float32).tiny)


@dataclass
class Totals:
    """What the data added up to."""

    examples: int = 0
    terms: Tensor | float = 0.0
    """``Σ m w``, on the device until it is asked for; only where it will be."""
    batches: int = 0

    def scale(self, normalize: str) -> float:
        """What sums are divided by: N, or ``Σ m w`` ("terms")."""
        if normalize == "examples":
            return float(self.examples)
        terms = float(self.terms)
        if terms == 0:
            raise InputError(
                describe(
                    'normalize="terms" and data in which no position counts',
                    "a sum of weights above 0",
                    "check ignore_index, mask and class weights",
                )
            )
        return terms


@dataclass(frozen=True)
class Sweep:
    """Everything needed to go over the data once more."""

    recorder: ModelRecorder
    source: Source
    likelihood: Likelihood
    cotangent: Cotangent
    memory: int
    normalize: str = "examples"
    batched: bool = field(default=False)

    def layers(
        self,
        observe: Callable[[LayerSpec, LayerIO, bool], None],
        description: str,
        ready: Callable[[], object] | None = None,
        settle: bool = True,
    ) -> Totals:
        """Hand every layer over as it comes; the flag says whether it is the batch's first cotangents.

        `ready` is called before the model runs on a batch, and again when it is known which layers fall back. Without
        `settle` the caller settles the recorder's checks, when it has queued all that it wants to.
        """

        def visit(recorded: RecordedBatch) -> None:
            for v, first, last in self.cotangents(recorded):
                recorded.each_layer(v, lambda spec, io, first=first: observe(spec, io, first), last)

        return self.visit(visit, description, ready, settle)

    def all_layers(self, observe: Callable[[dict[str, LayerIO]], None], description: str) -> Totals:
        """Hand all layers over at once."""

        def visit(recorded: RecordedBatch) -> None:
            for v, _, last in self.cotangents(recorded):
                observe(recorded.all_layers(v, last))

        return self.visit(visit, description)

    def visit(
        self,
        visit: Callable[[RecordedBatch], None],
        description: str,
        ready: Callable[[], object] | None = None,
        settle: bool = True,
    ) -> Totals:
        """Record every batch, in parts where memory asks for it."""
        totals = Totals()
        many = isinstance(self.cotangent, HessianRoot | OutputBasis) or getattr(self.cotangent, "samples", 1) > 1
        with self.recorder.session(settle):
            for batch in self.source.batches(description):
                self.recorder.prepare(batch)
                if ready is not None:
                    ready()  # what does not fit is refused before the model is run on all examples
                for part in self.parts(batch):
                    recorded = self.recorder.record(part, self.likelihood, batched=many, explained=True)
                    if ready is not None:
                        ready()
                    totals.examples += recorded.examples
                    if self.normalize == "terms":
                        totals.terms = totals.terms + recorded.terms.weight.sum(dtype=torch.float64)
                    visit(recorded)
                totals.batches += 1
        return totals

    def cotangents(self, recorded: RecordedBatch) -> Iterator[tuple[Tensor, bool, bool]]:
        """Cotangents in groups that fit, each with whether it is the first and the last."""
        count = self.cotangent.count(recorded.terms)
        allowed = min(COTANGENT_BYTES, self.memory // 4)
        size = max(1, min(count, allowed // max(2 * recorded.output_bytes(), 1)))
        for start in range(0, count, size):
            stop = min(start + size, count)
            v = self.cotangent.slice(recorded.terms, start, stop, recorded.batch.number)
            yield v.detach(), start == 0, stop == count

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """A batch, or parts of it that are predicted to fit in memory; random labels stay those of the whole."""
        findings = self.recorder.prepare(batch)
        n = example_count(batch.x, findings.example_axis, findings.shared)
        per_example = max(findings.bytes_per_example * GRAPH_FACTOR, 1)
        size = max(1, min(n, int(self.memory // 2 // per_example)))
        if size >= n:
            yield batch
            return
        for start in range(0, n, size):
            stop = min(start + size, n)

            def some(t: object, start: int = start, stop: int = stop) -> object:
                return findings.output.narrow(t, start, stop, n) if isinstance(t, Tensor) else t

            yield replace(
                batch,
                x=take(batch.x, start, stop, findings.example_axis, findings.shared),
                y=some(batch.y),
                mask=some(batch.mask),
                part=(start, n),
            )
