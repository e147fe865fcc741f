"""`Jacobian`: the push-forward ``J v`` and pull-back ``Jᵀ u`` of a model on inputs, without forming J.

Outputs are flattened example-major: row ``n·P + p`` of J belongs to function p of example n.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.foundations.arithmetic import OwnArithmetic
from layerwise.foundations.columns import Params, Shapes, from_flat, numel, read, to_flat
from layerwise.foundations.cotangents import OutputBasis
from layerwise.foundations.device import budget, require
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.progress import Progress
from layerwise.foundations.progress import resolve as resolve_progress
from layerwise.foundations.random import seed_of
from layerwise.foundations.types import statistics_dtype
from layerwise.foundations.vectors import ParamVector, unwrap
from layerwise.kernel.examples import Block, Examples, recording_sizes
from layerwise.kernel.fingerprint import Fingerprint, first_changed, held_by
from layerwise.kernel.outputs import Outputs, Selection
from layerwise.kernel.probe import record_as_probed
from layerwise.layers.capture.linearize import Linearization
from layerwise.layers.capture.model_call import in_own_arithmetic, refuse_train_mode_batch_norm
from layerwise.layers.capture.recorder import Check, ModelRecorder
from layerwise.layers.capture.source import COTANGENT_BYTES
from layerwise.layers.form import Part
from layerwise.layers.io.layer_io import flat_rows
from layerwise.layers.parts import find_layer, layers_of, own_name, own_shapes
from layerwise.layers.rules.generic import is_random
from layerwise.layers.table import LayerTable, OnUnsupported

CHUNK = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Scratch for one layer's standard form, if the memory allowed is large."""


@dataclass(frozen=True, eq=False, repr=False)
class Jacobian(OwnArithmetic, guard=in_own_arithmetic):
    """``J = ∂f/∂θ``, of shape (N·P, d): N examples, P functions of each, d parameters."""

    recorder: ModelRecorder
    examples: Examples
    outputs: Outputs
    out_shape: tuple[int, ...]
    """Shape of the functions of one example."""
    memory: int
    progress: Progress
    parts: tuple[Part, ...] | None = None
    """The parameters of one layer, where J is restricted to it."""
    _linear: list[Linearization] = field(default_factory=list, repr=False)
    _made_of: list[Fingerprint] = field(default_factory=list, repr=False)
    """The parameters at the time it was made; the same for all that are derived from it."""

    def __post_init__(self) -> None:
        if not self._made_of:
            self._made_of.append(Fingerprint(held_by(self.recorder.model)))

    def _check_unchanged(self) -> None:
        """Nothing is computed until it is asked for: by then the model must still be the one it was.

        Inside a session, whose checks are looked at before it ends.
        """
        flags, names = self._made_of[0].compare(held_by(self.recorder.model))

        def error() -> Exception:
            return InputError(
                describe(
                    f"a Jacobian or kernel whose parameter {first_changed(flags, names)!r} has been changed since it "
                    "was made",
                    "the parameters of that moment",
                    "call K.matrix() before training goes on (it is kept), or build it again",
                )
            )

        for some in flags:
            self.recorder.checks.add(some.any(), error)
        if not any(some.is_cuda for some in flags):  # no synchronization to put off
            self.recorder.checks.settle()

    # --- shape -------------------------------------------------------------------------------------------

    @property
    def shapes(self) -> Shapes:
        """Parameters that take part, in flat order."""
        return self.recorder.table.shapes if self.parts is None else own_shapes(self.parts)

    @property
    def functions(self) -> int:
        """P."""
        return torch.Size(self.out_shape).numel()

    @property
    def shape(self) -> tuple[int, int]:
        """(N·P, d)."""
        return self.examples.count * self.functions, numel(self.shapes)

    @property
    def dtype(self) -> torch.dtype:
        """What results are computed in."""
        return statistics_dtype(self._parameter().dtype)

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return self._parameter().device

    @contextmanager
    def session(self) -> Iterator[None]:
        """The model is run, and left as it was; convolutions in full precision, whatever torch's default is."""
        with self.recorder.session(), full_precision():
            self._check_unchanged()
            yield

    def _parameter(self) -> Tensor:
        return next(p for p in self.recorder.model.parameters() if p.requires_grad)

    @property
    def T(self) -> "PullBack":
        """``Jᵀ``: ``J.T @ u``."""
        return PullBack(self)

    # --- products ----------------------------------------------------------------------------------------

    def __matmul__(self, v: Any) -> Tensor:
        """``J v``: how outputs change for a parameter step.

        A flat vector ``[d]`` gives ``[N·P]``, a matrix of columns ``[d, B]`` gives ``[N·P, B]``; a `ParamVector` or
        dict gives the change in the outputs' own shape, ``[N, *out]``.
        """
        params, _ = read(v, self.shapes, self.dtype, self.device)
        pushed = self.push(params)  # [B, N·P]
        if not isinstance(v, Tensor):
            return pushed[0].view(-1, *self.out_shape)
        return pushed[0].to(v.dtype) if v.ndim == 1 else pushed.mT.to(v.dtype)

    @in_own_arithmetic
    def push(self, params: Params) -> Float[Tensor, "B NP"]:
        """``J v`` for columns ``{parameter: [B, *shape]}``."""
        full = self._embedded({k: t.clone() if t.is_inference() else t for k, t in params.items()})
        columns = []
        with self.session():
            for block in self._blocks("J v"):
                f, x = self._run(block)
                self.recorder.seed_forward(block.batch)
                pushed = self._linearization().push(x, f, full, lambda out, block=block: self._terms(out, block))
                columns.append(pushed.flatten(1))
        return torch.cat(columns, dim=1)

    @in_own_arithmetic
    def pull(self, u: Float[Tensor, "B NP"]) -> Params:
        """``Jᵀ u`` for columns, ``{parameter: [B, *shape]}``."""
        full = self.recorder.table.shapes
        wanted = list(full) if self.parts is None else [part.name for part in self.parts]
        total = {k: torch.zeros(u.shape[0], *full[k], dtype=self.dtype, device=self.device) for k in wanted}
        step = max(1, int(min(COTANGENT_BYTES, self.memory // 4) // max(8 * numel(full), 1)))
        with self.session():
            for block in self._blocks("Jᵀ u"):
                f, _ = self._run(block)
                P = self.functions
                cotangent = u[:, block.start * P : block.stop * P].view(-1, *f.shape)
                for start in range(0, u.shape[0], step):
                    stop = min(start + step, u.shape[0])
                    pulled = self._linearization().pull(f, cotangent[start:stop], retain_graph=stop < u.shape[0])
                    for k in wanted:
                        total[k][start:stop] += pulled[k]
        return self._restricted(total)

    def _linearization(self) -> Linearization:
        if not self._linear:
            names = list(self.recorder.table.shapes) if self.parts is None else [part.name for part in self.parts]
            self._linear.append(Linearization(self.recorder.model, names))
        return self._linear[0]

    def _run(self, block: Block) -> tuple[Tensor, Any]:
        self.recorder.prepare(block.batch)
        self.recorder.seed_forward(block.batch)
        with torch.enable_grad():
            f = self._terms(self._linearization().run(block.batch.x), block)
        self.recorder.check_output(f, block.batch)
        return f, block.batch.x

    def _terms(self, out: Tensor, block: Block) -> Tensor:
        return self.recorder.terms(out, block.batch, self.outputs, block.stop - block.start).f

    def _blocks(self, description: str) -> Iterable[Block]:
        blocks = self.examples.blocks
        return self.progress.track(blocks, description, len(blocks))

    def _embedded(self, params: Params) -> Params:
        """A vector of one layer as a vector of the parameters it is part of."""
        if self.parts is None:
            return params
        columns, shapes = next(iter(params.values())).shape[0], self.recorder.table.shapes
        full = {
            part.name: torch.zeros(columns, *shapes[part.name], dtype=self.dtype, device=self.device)
            for part in self.parts
        }
        for part in self.parts:
            part.of(full).copy_(params[own_name(part)])
        return full

    def _restricted(self, params: Params) -> Params:
        return params if self.parts is None else {own_name(part): part.of(params) for part in self.parts}

    # --- parts and rows ----------------------------------------------------------------------------------

    def layer(self, name: str) -> "Jacobian":
        """J restricted to the parameters of one layer."""
        if self.parts is not None:
            raise InputError(describe("layer() of one layer's Jacobian", "the whole Jacobian", "use it as it is"))
        table = self.recorder.table
        return replace(self, parts=find_layer(layers_of(table), table.shapes, name), _linear=[])

    def per_layer(self) -> dict[str, "Jacobian"]:
        """One restricted Jacobian a layer; ``J v`` is the sum of theirs."""
        return {spec.name: self.layer(spec.name) for spec in self.recorder.table.layers}

    def blocks(self) -> Iterator[Float[Tensor, "rows d"]]:
        """Rows of the dense Jacobian, a few examples at a time: all of them need not fit."""
        P = self.functions
        per_example = P * self.recorder.table.numel() * self.dtype.itemsize
        size = int(max(1, min(self.examples.size, COTANGENT_BYTES // max(per_example, 1))))
        whole = is_random(self.recorder.model)  # a random forward is seeded by block: it must be run as one
        for block in self.examples.blocks:
            n = block.stop - block.start
            for start in range(0, n, size):
                stop = min(start + size, n)
                if whole or stop - start == n:
                    yield self._rows(block, start, stop)
                else:
                    yield self._rows(self.examples.part(block, start, stop), 0, stop - start)

    @in_own_arithmetic
    def _rows(self, block: Block, start: int, stop: int) -> Float[Tensor, "rows d"]:
        """Rows of some examples of a block, layer by layer, cotangent by cotangent."""
        like, P = torch.zeros((), dtype=self.dtype, device=self.device), self.functions
        pieces = []
        with self.session():
            recorded = record_as_probed(self.recorder, block.batch, self.outputs, P)
            table = self.recorder.table
            step = self.cotangents_at_once(recorded.output_bytes())
            for first in range(0, P, step):
                last = min(first + step, P)
                v = OutputBasis().slice(recorded.terms, first, last, block.batch.number).detach()
                ios = recorded.all_layers(v, last == P)
                rows = flat_rows(ios, table, start, stop, last - first, like)
                pieces.append(rows.view(last - first, stop - start, -1))
        rows = torch.cat(pieces).transpose(0, 1).flatten(0, 1)
        return rows if self.parts is None else to_flat(self._restricted(from_flat(rows, table.shapes)), self.shapes)

    def cotangents_at_once(self, output_bytes: int) -> int:
        """How many functions are pulled back together, where the outputs recorded take that much."""
        allowed = min(COTANGENT_BYTES, self.memory // 4)
        return int(max(1, min(self.functions, allowed // max(2 * output_bytes, 1))))

    def to_dense(self) -> Float[Tensor, "NP d"]:
        """The whole matrix, rows example-major and columns in flat order."""
        rows, columns = self.shape
        require(
            2 * rows * columns * self.dtype.itemsize,
            self.memory,
            f"a dense Jacobian of {rows} × {columns}",
            "use J @ v and J.T @ u, go through J.blocks(), take J.layer(name), or allow more with memory=",
        )
        return torch.cat(list(self.blocks()))

    def __repr__(self) -> str:
        rows, columns = self.shape
        return f"Jacobian({rows} × {columns}; examples: {self.examples.count}, functions of each: {self.functions})"


@dataclass(frozen=True, eq=False)
class PullBack(OwnArithmetic, guard=in_own_arithmetic):
    """``Jᵀ``, of shape (d, N·P)."""

    jacobian: Jacobian

    @property
    def shape(self) -> tuple[int, int]:
        """(d, N·P)."""
        rows, columns = self.jacobian.shape
        return columns, rows

    @property
    def T(self) -> Jacobian:
        """J again."""
        return self.jacobian

    def __matmul__(self, u: Tensor) -> Any:
        """``Jᵀ u``.

        A vector in the outputs' own shape ``[N, *out]`` gives a `ParamVector`; flat ``[N·P]`` gives ``[d]``, and
        columns ``[N·P, B]`` give ``[d, B]``.
        """
        J = self.jacobian
        columns, kind = read_functions(u, J.examples.count, J.out_shape, J.dtype, J.device)
        pulled = J.pull(columns)
        if kind == "shaped":
            return ParamVector({k: t[0].to(u.dtype) for k, t in pulled.items()})
        flat = to_flat(pulled, J.shapes).to(u.dtype)
        return flat[0] if kind == "flat" else flat.mT

    def __repr__(self) -> str:
        return f"{self.jacobian!r}.T"


@contextmanager
def full_precision() -> Iterator[None]:
    """Convolutions without TF32, which torch allows by default, at three digits of precision."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def read_functions(
    u: Any, n: int, out_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, "B NP"], str]:
    """A function-space vector as columns ``[B, N·P]``, and what it was: "shaped", "flat" or "columns"."""
    rows = n * torch.Size(out_shape).numel()
    if isinstance(u, Tensor):
        t = u.detach().to(device=device, dtype=dtype)
        t = t.clone() if t.is_inference() else t
        if out_shape and tuple(u.shape) == (n, *out_shape):
            return t.reshape(1, rows), "shaped"
        if tuple(u.shape) == (rows,):
            return t.reshape(1, rows), "flat"
        if u.ndim == 2 and u.shape[0] == rows:
            return t.mT.contiguous(), "columns"
    given = f"a tensor of shape {tuple(u.shape)}" if isinstance(u, Tensor) else f"a {type(u).__name__}"
    shaped = f"{(n, *out_shape)}, " if out_shape else ""
    raise InputError(
        describe(
            given,
            f"a tensor of shape {shaped}({rows},) or ({rows}, columns)",
            "give one number for each function of each example, example-major",
        )
    )


@in_own_arithmetic
def jacobian(
    model: nn.Module,
    x: Any,
    outputs: Selection = "all",
    *,
    select: str | Iterable[str] = "*",
    on_unsupported: OnUnsupported = "elementwise",
    example_axis: int | None = None,
    seed: int | torch.Generator = 0,
    memory: int | float | None = None,
    progress: bool | Progress | None = None,
    check: Check = "first",
) -> Jacobian:
    """The Jacobian of a model's outputs on inputs, as a linear map.

    ``J @ v`` pushes a parameter step forward to the change of the outputs; ``J.T @ u`` pulls a vector of outputs
    back to the parameters. Neither forms J. Rows are ordered example-major.

    >>> import torch, layerwise as lw
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> J = lw.jacobian(model, torch.randn(16, 4))
    >>> v = lw.ParamVector.randn(model, generator=0)
    >>> (J @ v).shape, (J.T @ torch.randn(16, 3)).numel(), J.to_dense().shape
    (torch.Size([16, 3]), 67, torch.Size([48, 67]))

    Args:
        model: any module; it is left exactly as it was.
        x: inputs as the model takes them: a tensor, a tuple (``model(*x)``) or a mapping (``model(**x)``); or a list
            or loader of batches, of which labels are ignored.
        outputs: "all"; "sum" (of all outputs of an example); an index, or a list of them, into the last axis; or a
            function ``[N, *out] -> [N, *functions]``, such as ``lambda f: f[:, 8] - f[:, 3]``.
        select: patterns of the layers that take part.
        on_unsupported: what happens to parameters without a layer rule.
        example_axis: axis of the examples in the input, where it should not be found.
        seed: of a random forward (dropout in train mode).
        memory: bytes this may use; default half of what is free.
        progress: True, False, or an object with `track`; by default a bar on a terminal for long work.
        check: when what is recorded is compared with autograd: "first", "always" or "never", see `lw.fisher`.
    """
    start = prepare(model, outputs, select, on_unsupported, example_axis, seed, memory, check)
    recorder, reading, device, allowed = start
    examples = Examples(x, recorder)
    probe = probe_outputs(recorder, examples, reading)
    examples.cut(recording_sizes(allowed // 2, device, probe.graph_bytes, 0, 1)[0])
    return Jacobian(recorder, examples, reading, probe.out_shape, allowed, resolve_progress(progress))


def prepare(
    model: nn.Module,
    outputs: Selection,
    select: str | Iterable[str],
    on_unsupported: OnUnsupported,
    example_axis: int | None,
    seed: int | torch.Generator,
    memory: int | float | None,
    check: Check = "first",
) -> tuple[ModelRecorder, Outputs, torch.device, int]:
    """What every function-space object starts from; the device, and the bytes allowed."""
    model, reading = unwrap(model), Outputs(outputs)
    refuse_train_mode_batch_norm(model.named_modules())
    table = LayerTable.from_model(model, select, on_unsupported)
    device = next(p.device for p in model.parameters() if p.requires_grad)
    allowed = budget(memory, device)
    chunk = min(CHUNK.get(device.type, CHUNK["cpu"]), max(allowed // 16, 2**20))
    return ModelRecorder(model, table, example_axis, chunk, seed_of(seed), check), reading, device, allowed


@dataclass(frozen=True)
class OutputProbe:
    """What a first run on one or two examples tells."""

    out_shape: tuple[int, ...]
    graph_bytes: float
    """Recorded inputs and outputs of one example."""


def probe_outputs(recorder: ModelRecorder, examples: Examples, outputs: Outputs) -> OutputProbe:
    """The shape of the functions, and what an example takes."""
    batch = examples.first(2)
    with recorder.session():
        recorder.prepare(batch)
        recorder.seed_forward(batch)
        n = recorder.examples(batch)
        linear = Linearization(recorder.model, [])
        with torch.no_grad():
            f = linear.run(batch.x)
            recorder.check_output(f, batch)
            outputs.check(f, recorder.arrange, n)
            shape = outputs.functions(f, recorder.arrange(n)).shape[1:]
    assert recorder.findings is not None
    return OutputProbe(tuple(shape), recorder.findings.bytes_per_example)
