"""`Tracker`: what becomes of the tangent kernel while a network trains, on a few fixed examples.

A snapshot leaves no trace in the training: not in torch's random state, nor in gradients, buffers, hooks, or train and
eval flags. Kernels are taken in eval mode.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, NumericalError, describe
from layerwise.foundations.modes import evaluating
from layerwise.foundations.types import leaves, map_leaves
from layerwise.kernel.alignment import EIGEN_FLOOR, Spectrum, cka
from layerwise.kernel.kernel import Kernel, MatrixKernel, check_centering
from layerwise.kernel.ntk import ntk
from layerwise.regimes.snapshots import Schedule, read_schedule


@runtime_checkable
class Training(Protocol):
    """A training at one moment, as `layerwise.training` gives it to what it measures."""

    @property
    def step(self) -> int:
        """Updates that were made."""
        ...

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        ...


@runtime_checkable
class Sink(Protocol):
    """Where snapshots are sent as they come, such as `layerwise.training.tensorboard.TensorBoard`."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Take what was measured at a step."""
        ...


@runtime_checkable
class Stream(Protocol):
    """Where the live line is written, such as ``sys.stderr``."""

    def write(self, text: str, /) -> object:
        """Take some text."""
        ...

    def flush(self) -> object:
        """Show it."""
        ...


class Tracker:
    """Measures of the tangent kernel on fixed examples, along a training.

    In a loop of one's own, where `step` counts the updates that were made (and ``tracker.record(step)`` takes a
    snapshot whether one is due or not):

    >>> import torch, layerwise as lw
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> x, y = torch.randn(30, 4), torch.randint(3, (30,))
    >>> opt = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> tracker = lw.regimes.Tracker(model, (x, y), every=5)
    >>> for step in range(11):
    ...     _ = tracker(step)
    ...     opt.zero_grad()
    ...     torch.nn.functional.cross_entropy(model(x), y).backward()
    ...     opt.step()
    >>> series = tracker.series()
    >>> series["step"], len(series["cka"]), len(series["cka/2"]), sorted(series)[:3]
    ([0, 5, 10], 3, 3, ['cka', 'cka/0', 'cka/2'])

    In `layerwise.training`: ``train(problem, optimizer, measures=[(tracker.every, tracker)])`` with a tracker whose
    model is None, since the training makes its own.

    Every snapshot has, of the centred kernel, "eigenvalue/max", "eigenvalue/mean" and "eigenvalue/median",
    "effective_rank", "trace_ratio/k" (the part of the trace in the k largest eigenvalues), and, where a probe has
    labels, "cka" with them and "cka/<layer>" of each layer's own kernel. Of several probes, names begin with theirs.

    Args:
        model: what is trained; None where a training gives its own.
        probe: inputs and labels ``(x, y)`` (integers, or values of the outputs' shape), inputs alone, or several
            probes by name, such as ``{"train": (x, y), "test": (x2, y2)}``.
        every: a number of steps, or a schedule with ``due(step)``; by default `Snapshots`.
        examples: the first so many of each probe are used; the kernel has a row for each of them and each output.
        centering: "per-output", "global" or "none", see `Kernel.centered`.
        other_centerings: by which CKA is measured as well, as "cka-global" or "cka-none".
        ranks: the k of the trace ratios.
        layers: whether the CKA of every layer is measured, too.
        spectrum: whether eigenvalues are; without them a snapshot costs half.
        sinks: where snapshots are sent, too, such as ``[TensorBoard(folder)]`` of `layerwise.training.tensorboard`.
        live: whether to show the newest snapshot in one line of the terminal (or of a given text stream).
    """

    def __init__(
        self,
        model: nn.Module | None,
        probe: Any,
        every: int | Schedule | None = None,
        *,
        examples: int = 100,
        centering: str = "per-output",
        other_centerings: Sequence[str] = (),
        ranks: Sequence[int] = (40,),
        layers: bool = True,
        spectrum: bool = True,
        sinks: Sequence[Sink] = (),
        live: bool | Stream = False,
    ) -> None:
        for way in (centering, *other_centerings):
            check_centering(way)
        for name, numbers in (("examples", [examples]), ("ranks", ranks)):
            if any(not isinstance(k, int) or k < 1 for k in numbers):
                raise InputError(describe(f"{name}={numbers}", "whole numbers ≥ 1", "take e.g. the default"))
        self.model = model
        self.probes = _read_probes(probe, examples)
        self.every = read_schedule(every)
        self.other_centerings = tuple(other_centerings)
        self.centering, self.ranks, self.layers, self.spectrum = centering, tuple(ranks), layers, spectrum
        self.sinks = tuple(sinks)
        self._live: Stream | None = sys.stderr if live is True else None if live is False else live
        self._steps: list[int] = []
        self._columns: dict[str, list[float]] = {}

    def __call__(self, at: int | Training) -> dict[str, float]:
        """A snapshot, if one is due at this step (a training asks only when it is); what it found, else nothing."""
        if isinstance(at, int):
            return self.record(at) if self.every.due(at) else {}
        return self.record(at.step, at.model)

    def record(self, step: int, model: nn.Module | None = None) -> dict[str, float]:
        """A snapshot now; a step that is there already is not measured again."""
        model = self._model(model)
        if self._steps and step <= self._steps[-1]:
            if step == self._steps[-1]:
                return {name: column[-1] for name, column in self._columns.items()}
            given = f"step {step} after step {self._steps[-1]}"
            raise InputError(describe(given, "steps that grow", "count all updates, or make a new Tracker"))
        values: dict[str, float] = {}
        with evaluating(model):
            for name, (x, y) in self.probes.items():
                found = self._measured(model, x, y)
                values |= {f"{name}/{key}" if name else key: value for key, value in found.items()}
        for name in {**self._columns, **values}:  # a layer may have been frozen before, or be so now
            column = self._columns.setdefault(name, [math.nan] * len(self._steps))
            column.append(values.get(name, math.nan))
        self._steps.append(step)
        for sink in self.sinks:
            sink.add(step, values)
        if self._live is not None:
            self._live.write(f"\r\x1b[K{self._line(step, values)}")
            self._live.flush()
        return values

    def series(self) -> dict[str, list]:
        """What was measured, "step" first: lists of one length, NaN where a layer was frozen."""
        return {"step": list(self._steps)} | {name: list(column) for name, column in self._columns.items()}

    def close(self) -> None:
        """End the line of the terminal, and close what it was sent to."""
        if self._live is not None and self._steps:
            self._live.write("\n")
        for sink in self.sinks:
            getattr(sink, "close", lambda: None)()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _model(self, given: nn.Module | None) -> nn.Module:
        if self.model is not None and given is not None and given is not self.model:
            raise InputError(
                describe("a tracker of one model, and a training of another", "one model", "make it with model=None")
            )
        model = given if self.model is None else self.model
        if model is None:
            raise InputError(describe("a tracker without a model", "a model", "pass Tracker(model, probe)"))
        return model

    def _measured(self, model: nn.Module, x: Any, y: Tensor | None) -> dict[str, float]:
        place = next((p.device for p in model.parameters()), torch.device("cpu"))
        x = map_leaves(lambda t: t.to(place), x)
        K = ntk(model, x, progress=False, check="never" if self._steps else "first")
        parts = K.per_layer() if self.layers and y is not None else {}
        whole = MatrixKernel(sum(part.matrix() for part in parts.values()), K.out_shape) if parts else K  # type: ignore[arg-type]
        found: dict[str, Tensor] = {}
        if y is not None:
            y = y.to(place)
            found["cka"] = cka(whole, y, self.centering)
            found |= {f"cka-{way}": cka(whole, y, way) for way in self.other_centerings}
            found |= {f"cka/{name}": cka(part, y, self.centering) for name, part in parts.items()}
        if self.spectrum:
            values = eigenvalues(whole.centered(self.centering))
            found |= {f"eigenvalue/{name}": getattr(values, name)() for name in ("max", "mean", "median")}
            found["effective_rank"] = values.effective_rank()
            rows = len(values.values)
            found |= {f"trace_ratio/{k}": values.trace_ratio(min(k, rows)) for k in self.ranks}
        return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))

    def _line(self, step: int, values: Mapping[str, float]) -> str:
        """Probe by probe, without the layers."""
        shown = {"cka": "CKA", "effective_rank": "effective rank", "eigenvalue/max": "λ₁"}
        parts = []
        for name in self.probes:
            keys = {f"{name}/{key}" if name else key: label for key, label in shown.items()}
            found = ", ".join(f"{label} {values[key]:.3g}" for key, label in keys.items() if key in values)
            parts.append(f"{name}: {found}" if name else found)
        return f"step {step}  " + "  ".join(parts)


def eigenvalues(K: Kernel) -> Spectrum:
    """Those of a kernel that is centred already: as `lw.spectrum`, without eigenvectors, in a fifth of the time."""
    matrix = K.matrix().double()
    try:
        values = torch.linalg.eigvalsh((matrix + matrix.mT) / 2).flip(0)
    except RuntimeError as error:
        given = f"a tangent kernel of {len(matrix)} rows whose eigenvalues do not converge ({error})"
        raise NumericalError(describe(given, "a finite, symmetric kernel", "pass spectrum=False")) from error
    precision = torch.finfo(K.dtype).eps if K.dtype != torch.float64 else 0.0
    floor = max(EIGEN_FLOOR, precision) * float(values[0])
    return Spectrum(torch.where(values > floor, values, 0.0), floor, int((values <= floor).sum()))


def _read_probes(probe: Any, examples: int) -> dict[str, tuple[Any, Tensor | None]]:
    """By name, inputs and labels of the first examples; the name is empty for one probe alone."""
    if isinstance(probe, Mapping):
        if not probe or not all(isinstance(name, str) and name for name in probe):
            raise InputError(
                describe(f"probes named {list(probe)}", "some, each with a name", 'pass e.g. {"test": (x, y)}')
            )
        return {name: _read_probe(one, examples, f"the probe {name!r}") for name, one in probe.items()}
    return {"": _read_probe(probe, examples, "the probe")}


def _read_probe(probe: Any, examples: int, what: str) -> tuple[Any, Tensor | None]:
    x, y = (probe, None) if isinstance(probe, Tensor) else _pair(probe, what)
    tensors = [t for t in leaves(x) if isinstance(t, Tensor) and t.ndim]
    n = len(y) if y is not None else len(tensors[0]) if tensors else 0
    if not n or not any(len(t) == n for t in tensors):
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        given = f"{what} with inputs of shape {shapes or 'none'} and {'no' if y is None else len(y)} labels"
        raise InputError(describe(given, "as many of both, one at least", "pass (x, y)"))
    # Copies, so that a batch that is filled again does not change the probe.
    x = map_leaves(lambda t: (t[:examples] if t.ndim and len(t) == n else t).detach().clone(), x)
    return x, None if y is None else y[:examples].detach().clone()


def _pair(probe: Any, what: str) -> tuple[Any, Tensor | None]:
    if isinstance(probe, Sequence) and len(probe) == 2 and (probe[1] is None or isinstance(probe[1], Tensor)):
        return probe[0], probe[1]
    given = f"{what} of type {type(probe).__name__}"
    raise InputError(describe(given, "inputs and labels (x, y), or inputs alone as a tensor", "pass (x, y)"))
