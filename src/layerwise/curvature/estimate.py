"""From a sweep over the data to a matrix in a given structure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from layerwise.curvature.approximation import Approximation, Options
from layerwise.curvature.block_diagonal import BlockDiagonal
from layerwise.curvature.low_rank import LowRank
from layerwise.curvature.matrix import DenseMatrix, ParamMatrix
from layerwise.foundations.device import Checks, require
from layerwise.foundations.errors import InputError, NameLookupError, NumericalError, describe, unknown
from layerwise.foundations.linalg.checks import require_finite
from layerwise.foundations.operators import Block, BlockOperator, Diagonal
from layerwise.foundations.registry import import_folder
from layerwise.foundations.types import statistics_dtype
from layerwise.layers.capture.source import Sweep, Totals
from layerwise.layers.io.layer_io import LayerIO, flat_rows
from layerwise.layers.parts import layers_of
from layerwise.layers.table import LayerSpec, LayerTable, TableChanged, matches

LAYER_STRUCTURES = ("diag", "quasidiag", "block", "kfac", "ekfac")
STRUCTURES = (*LAYER_STRUCTURES, "dense", "lowrank", "implicit")
Structure = str | Mapping[str, str]


def approximation(name: str) -> type[Approximation]:
    """The class of a structure of single layers, by name."""
    import_folder("layerwise.curvature")
    return Approximation.known[name]


def check_structure(structure: Any, allowed: tuple[str, ...], what: str) -> None:
    """A structure that exists for this matrix, or an error that names those that do."""
    names = list(structure.values()) if isinstance(structure, Mapping) else [structure]
    for name in names:
        if name not in STRUCTURES:
            import_folder("layerwise.curvature")  # once: a file that was added there is found without any list
            if name in Approximation.known and name != "group" and "kfac" in allowed:
                continue  # a subclass of `Approximation` that somebody else has added
            raise NameLookupError(unknown("structure", name, STRUCTURES))
        if name not in allowed:
            raise InputError(
                describe(f'structure "{name}" for {what}', f"one of: {', '.join(allowed)}", "choose one of these")
            )
        if isinstance(structure, Mapping) and name not in LAYER_STRUCTURES:
            raise InputError(
                describe(
                    f'"{name}" inside a mixed structure',
                    f"structures of single layers: {', '.join(LAYER_STRUCTURES)}",
                    f'use structure="{name}" alone',
                )
            )


def assign(structure: Structure, table: LayerTable) -> dict[str, str]:
    """The structure that each layer asks for: the first pattern that matches it wins."""
    if isinstance(structure, str):
        return {spec.name: structure for spec in table.layers}
    for pattern in structure:
        if not any(matches(spec, pattern) for spec in table.layers):
            raise NameLookupError(unknown("layer", pattern, table.names()))
    chosen = {}
    for spec in table.layers:
        names = (spec.name, *spec.parameters)
        pattern = next((p for p in structure if any(fnmatchcase(n, p) for n in names)), None)
        if pattern is None:
            raise InputError(
                describe(
                    f"a mixed structure without a pattern for layer {spec.name!r}",
                    "a pattern for every layer",
                    'add {"*": "diag"}',
                )
            )
        chosen[spec.name] = structure[pattern]
    return chosen


def estimate(sweep: Sweep, structure: Structure, options: Options, centered: bool = False) -> ParamMatrix:
    """Go over the data and give the matrix."""
    if structure == "dense":
        return dense(sweep, centered)
    if structure == "lowrank":
        return low_rank(sweep, centered)
    return by_layer(sweep, structure, options, centered)


def _first_look(sweep: Sweep) -> tuple[torch.dtype, torch.device]:
    """Examine the model on the first batch, so that layers that fall back are known before sums are made."""
    parameter = next(p for p in sweep.recorder.model.parameters() if p.requires_grad)
    return statistics_dtype(parameter.dtype), parameter.device


class _Statistics:
    """One approximation a layer, made when the table is final (after the first batch was examined)."""

    def __init__(self, sweep: Sweep, structure: Structure, options: Options) -> None:
        self.sweep, self.structure, self.options = sweep, structure, options
        self.dtype, self.device = _first_look(sweep)
        self.begun = False
        """Whether anything has been added up."""
        self._made: dict[str, Approximation] | None = None

    @property
    def of(self) -> dict[str, Approximation]:
        """Approximations by layer."""
        if self._made is None:
            table = self.sweep.recorder.table
            asked = assign(self.structure, table)
            classes = {spec.name: approximation(spec.structure(asked[spec.name])) for spec in table.layers}
            self._require(table, classes)
            self._made = {
                spec.name: classes[spec.name](spec, self.options, self.dtype, self.device) for spec in table.layers
            }
        return self._made

    def prepare(self) -> None:
        """Make them when the first batch has been verified; the table changes if a later one shows more."""
        if {name: a.spec.form for name, a in self.of.items()} != self.sweep.recorder.table.forms():
            if self.begun:
                raise TableChanged
            self._made = None

    def _require(self, table: LayerTable, classes: dict[str, type[Approximation]]) -> None:
        needed = {s.name: classes[s.name].bytes_needed(s, self.dtype.itemsize) for s in table.layers}
        if sum(needed.values()) > self.sweep.memory:
            worst = max(needed, key=lambda name: needed[name])
            require(
                sum(needed.values()),
                self.sweep.memory,
                f"structure {self.structure!r} of {table.numel()} parameters (most of it for layer {worst!r})",
                'use structure="kfac", or "diag" for the layers that are too large, or allow more with memory=',
            )


def by_layer(sweep: Sweep, structure: Structure, options: Options, centered: bool = False) -> BlockDiagonal:
    """diag, quasidiag, block, kfac, ekfac, or a mixture."""
    while True:  # each time with one layer fewer, at least, that does not fall back
        try:
            return _by_layer(sweep, structure, options, centered)
        except TableChanged:
            sweep.source.restart("in which a later batch uses a layer in a way that the first ones do not")


def _by_layer(sweep: Sweep, structure: Structure, options: Options, centered: bool) -> BlockDiagonal:
    statistics = _Statistics(sweep, structure, options)
    means = _Means() if centered else None
    passes = _passes(structure)
    sweep.source.require_passes(passes, f"structure {structure!r}")

    def observe(spec: LayerSpec, io: LayerIO, first: bool) -> None:
        statistics.begun = True
        statistics.of[spec.name].observe(io, first)
        if means is not None:
            means.add(spec, io)

    # The last pass leaves its checks to `_require_finite`, when all is queued: one synchronization.
    totals = sweep.layers(observe, f"{_label(structure)}", statistics.prepare, settle=passes == 2)
    if passes == 2:
        for approximation in statistics.of.values():
            approximation.refresh()

        def correct(spec: LayerSpec, io: LayerIO, first: bool) -> None:
            if statistics.of[spec.name].passes == 2:
                statistics.of[spec.name].correct(io)

        sweep.layers(correct, f"{_label(structure)}, second pass", statistics.prepare, settle=False)
    count = _scale(sweep, totals)
    _divide([pair for a in statistics.of.values() for pair in a.sums(count)])
    operators = {name: a.finish(count) for name, a in statistics.of.items()}
    if means is not None:
        operators = {name: means.centered(name, op, count) for name, op in operators.items()}
    _require_finite(statistics.of, operators, sweep.recorder.checks)
    positions = {name: a.positions() for name, a in statistics.of.items()}
    return BlockDiagonal(
        sweep.recorder.table, operators, _label(structure), None if centered else count, positions, sweep.memory
    )


def _scale(sweep: Sweep, totals: Totals) -> float:
    """What sums are divided by; where terms must be counted, the checks come with their number."""
    if sweep.normalize != "examples":
        sweep.recorder.checks.settle()
    return totals.scale(sweep.normalize)


def _divide(sums: Sequence[tuple[Tensor, float]]) -> None:
    """Divide in place, all at once: one launch for many tensors where the device has such a thing."""
    if sums:
        torch._foreach_div_([tensor for tensor, _ in sums], [divisor for _, divisor in sums])  # pyright: ignore[reportPrivateImportUsage]


def _require_finite(
    approximations: Mapping[str, Approximation], operators: Mapping[str, BlockOperator], checks: Checks
) -> None:
    """Name the layer and the statistic that is not finite; one readback for all layers.

    What is still to be checked of the batches comes first: it is the likely cause.
    """
    looked_at = list[Tensor]()
    for name, approximation in approximations.items():
        diagonals = approximation.diagonals()
        looked_at += operators[name].tensors().values() if diagonals is None else diagonals
    sizes = [tensor for tensor in looked_at if tensor.numel()]
    if sizes:
        largest = torch._foreach_norm(sizes, torch.inf)  # pyright: ignore[reportPrivateImportUsage]
        bad = ~torch.isfinite(torch.stack(largest)).all()
        checks.add(bad, lambda: _not_finite(operators))
    checks.settle()


def _not_finite(operators: Mapping[str, BlockOperator]) -> Exception:
    for name, operator in operators.items():
        for key, tensor in operator.tensors().items():
            try:
                require_finite(tensor, f"layer {name!r}: statistics {key!r}")
            except NumericalError as error:
                return error
    raise AssertionError("unreachable")


def _passes(structure: Structure) -> int:
    names = structure.values() if isinstance(structure, Mapping) else [structure]
    return max(approximation(name).passes for name in names)


def _label(structure: Structure) -> str:
    return structure if isinstance(structure, str) else "mixed"


@dataclass
class _Means:
    """Mean gradients, for centered moments."""

    def __post_init__(self) -> None:
        self.total: dict[str, Tensor] = {}

    def add(self, spec: LayerSpec, io: LayerIO) -> None:
        """Add the batch's gradient."""
        grad = torch.stack([chunk.grad()[0] for chunk in io.chunks(gradients=False)]).sum(0)
        self.total[spec.name] = self.total[spec.name] + grad if spec.name in self.total else grad

    def centered(self, name: str, op: BlockOperator, count: float) -> BlockOperator:
        """The second moment minus the outer product of the mean."""
        if name not in self.total:
            return op
        mean = self.total[name] / count
        if isinstance(op, Diagonal):
            return Diagonal((op.values - mean.square()).clamp_min(0))
        assert isinstance(op, Block)
        rows = mean.reshape(op.matrix.shape[:2])
        return Block(op.matrix - rows.unsqueeze(-1) * rows.unsqueeze(-2), op.block_shape)


def _each_rows(sweep: Sweep, consume: Any, description: str) -> Any:
    """Per-example gradients of all parameters, a few examples at a time."""
    dtype, device = _first_look(sweep)
    like = torch.zeros((), dtype=dtype, device=device)

    def observe(ios: dict[str, LayerIO]) -> None:
        if not ios:
            return
        first = next(iter(ios.values()))
        table = sweep.recorder.table
        per_example = first.vectors * table.numel() * dtype.itemsize
        step = max(1, min(first.examples, (128 * 2**20) // max(per_example, 1)))
        for start in range(0, first.examples, step):
            stop = min(start + step, first.examples)
            consume(flat_rows(ios, table, start, stop, first.vectors, like))

    return sweep.all_layers(observe, description)


def dense(sweep: Sweep, centered: bool = False) -> DenseMatrix:
    """The whole matrix."""
    dtype, device = _first_look(sweep)
    d = sweep.recorder.table.numel()
    require(
        2 * d * d * dtype.itemsize,
        sweep.memory,
        f'structure "dense" of {d} parameters',
        'use structure="kfac" or "block", or products with structure="implicit"; or allow more with memory=',
    )
    total = torch.zeros(d, d, dtype=dtype, device=device)
    mean = torch.zeros(d, dtype=dtype, device=device)

    def add(R: Tensor) -> None:
        total.addmm_(R.mT, R)
        mean.add_(R.sum(0))

    totals = _each_rows(sweep, add, "dense")
    count = totals.scale(sweep.normalize)
    matrix = total / count
    if centered:
        matrix -= torch.outer(mean, mean) / count**2
    require_finite(matrix, 'structure "dense"')
    table = sweep.recorder.table
    return DenseMatrix(matrix, table.shapes, True, None if centered else count, layers_of(table), sweep.memory)


def low_rank(sweep: Sweep, centered: bool = False) -> LowRank:
    """One row a cotangent and example."""
    kept: list[Tensor] = []
    size = 0

    def add(R: Tensor) -> None:
        nonlocal size
        size += R.numel() * R.dtype.itemsize
        require(
            2 * size,
            sweep.memory,
            f'structure "lowrank" with {size // R.dtype.itemsize // R.shape[1]} rows so far',
            'use fewer examples, estimator="sampled", or structure="implicit"; or allow more with memory=',
        )
        kept.append(R)

    totals = _each_rows(sweep, add, "lowrank")
    count = totals.scale(sweep.normalize)
    if not kept:  # nothing that is trained takes part: the matrix is zero
        dtype, device = _first_look(sweep)
        kept.append(torch.zeros(1, sweep.recorder.table.numel(), dtype=dtype, device=device))
    R = torch.cat(kept)
    if centered:
        R = R - R.sum(0) / count
    require_finite(R, 'structure "lowrank"')
    table = sweep.recorder.table
    return LowRank(R / count**0.5, table.shapes, None if centered else count, layers_of(table), sweep.memory)
