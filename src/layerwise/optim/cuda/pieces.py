"""Where the entries of a stack lie in its layers' parameters, as tables on the device.

A pass over a stack (gather its gradients, subtract its update) is one launch whatever its layers are: matrices and
biases, several matrices in one parameter, stored transposed or with channels last. A program of the launch looks up
which tile of which piece it has, and where that lies. Addresses are data, not arguments: a CUDA graph that was captured
with some gradients reads those of the next step once their addresses are sent, and keeps no copy of them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int32, Int64
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.layers.form import Form, Part
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.scaled import Scaled, unscaled
from layerwise.optim.cuda.triton import pieces as passes
from layerwise.optim.cuda.triton.device import available
from layerwise.optim.cuda.triton.pieces import COLUMNS, FINISH, ROWS, VECTOR
from layerwise.optim.options import rate
from layerwise.optim.step.stack import Stack
from layerwise.optim.step.update import weight_norms

TAKEN = (torch.float32, torch.bfloat16, torch.float16)
"""Types that the kernels read; they compute in float32."""
MOST_ENTRIES = 2**31 - 2**16
"""Of a piece: kernels count rows and columns in 32 bits."""


@dataclass(frozen=True)
class Piece:
    """A block of a parameter, rows × columns with entries of a row side by side, and where it goes in the stack."""

    slot: int
    """Of the parameter, in the table of addresses."""
    base: int
    """Entries before it in the parameter."""
    rows: int
    columns: int
    row_stride: int
    limit: int
    """Entries from `base` on, where the last row is not full."""
    offset: int
    """Entries before it in the stack."""
    stack_row: int
    stack_column: int
    group: int
    rate: int
    """Row of the table of learning rates."""

    @property
    def aligned(self) -> bool:
        """Whether `VECTOR` entries can be read and written at once, if the addresses are aligned too."""
        counted = (self.base, self.columns, self.row_stride, self.limit, self.offset, self.stack_row)
        return self.stack_column == 1 and all(n % VECTOR == 0 for n in counted)

    def tiles(self, number: int) -> Int32[Tensor, "T 3"]:
        """(piece, first row, first column) of each tile."""
        rows, columns = torch.arange(0, self.rows, ROWS), torch.arange(0, self.columns, COLUMNS)
        grid = torch.cartesian_prod(rows, columns).view(-1, 2)
        return torch.cat([torch.full_like(grid[:, :1], number), grid], 1).int()


def _linear(slot: int, base: int, count: int, offset: int, group: int, rate: int) -> Piece:
    """Entries that follow one another in both, as rows of a tile's width."""
    rows = -(-count // COLUMNS)
    return Piece(slot, base, rows, COLUMNS, COLUMNS, count, offset, COLUMNS, 1, group, rate)


def _of_weight(form: Form, part: Part, p: Tensor, stack: "_Layout", k: int, slot: int, rate: int) -> Iterator[Piece]:
    """A layer's weight, from group k of the stack on."""
    K, O, I, base, group = form.groups, form.outputs, form.weight_inputs, _base(part, p), stack.group
    limit = K * O * I
    if not p.is_contiguous():  # channels last: an offset of the kernel after the other, channels side by side
        channels, taps = p.shape[1], p[0, 0].numel()
        for tap in range(taps):
            first, across = tap * channels, taps * channels
            sizes = (O, channels, across, limit - first)
            yield Piece(slot, first, *sizes, k * group + tap, stack.row, taps, k, rate)
    elif form.transposed and not stack.transposed:
        across, between = (K * O, O) if form.cut else (O, O * I)
        for j in range(K):
            first = base + j * between
            yield Piece(slot, first, I, O, across, limit, (k + j) * group, stack.column, stack.row, k + j, rate)
    elif stack.transposed:
        whole = stack.outputs == O
        yield (
            _linear(slot, base, limit, k * group, k, rate)
            if whole
            else Piece(slot, base, I, O, O, limit, k * group, stack.column, stack.row, k, rate)
        )
    elif stack.inputs == I and (K == 1 or stack.outputs == O):
        yield _linear(slot, base, limit, k * group, k, rate)
    elif I == 1:
        yield _column(form, slot, base, k * group, stack, k, rate)
    else:
        together = K if stack.outputs == O else 1  # matrices whose rows follow one another
        for j in range(0, K, together):
            sizes = (base + j * O * I, together * O, I, I, limit)
            yield Piece(slot, *sizes, (k + j) * group, stack.row, stack.column, k + j, rate)


def _of_bias(form: Form, part: Part, p: Tensor, stack: "_Layout", k: int, slot: int, rate: int) -> Iterator[Piece]:
    """A layer's bias, the last column of its groups."""
    place = k * stack.group + form.weight_inputs * stack.column
    yield _column(form, slot, _base(part, p), place, stack, k, rate)


def _column(form: Form, slot: int, base: int, place: int, stack: "_Layout", k: int, rate: int) -> Piece:
    """One column of all groups of a layer; that of many groups of one row (of a norm) is a row in the parameter."""
    K, O = form.groups, form.outputs
    rows, columns, steps = (1, K, (0, stack.group)) if O == 1 else (K, O, (stack.group, stack.row))
    return Piece(slot, base, rows, columns, columns, K * O, place, *steps, k, rate)


def _base(part: Part, p: Tensor) -> int:
    return 0 if part.rows is None else part.rows[0] * (p.numel() // max(len(p), 1))


@dataclass(frozen=True)
class _Layout:
    """How a stack ``[K, O, I]`` lies in memory: row by row, or each matrix transposed."""

    outputs: int
    inputs: int
    transposed: bool

    @property
    def sides(self) -> tuple[int, int]:
        """Of a matrix as it lies there."""
        return (self.inputs, self.outputs) if self.transposed else (self.outputs, self.inputs)

    @property
    def group(self) -> int:
        """Entries of a matrix."""
        return self.outputs * self.inputs

    @property
    def row(self) -> int:
        """From row to row."""
        return 1 if self.transposed else self.inputs

    @property
    def column(self) -> int:
        """From column to column."""
        return self.outputs if self.transposed else 1


def _takes(p: Tensor) -> bool:
    """Whether a parameter's entries lie in one piece, in the order of its axes or with channels last."""
    in_order = p.is_contiguous() or (p.ndim == 4 and p.is_contiguous(memory_format=torch.channels_last))
    return p.dtype in TAKEN and in_order and 0 < p.numel() <= MOST_ENTRIES


@dataclass
class StackPieces:
    """The pieces of one stack."""

    stack: Stack
    table: Int64[Tensor, "p f"]
    """A row a `Piece`."""
    tiles: Int32[Tensor, "T 3"]
    transposed: bool
    """Whether tensors of the stack have each matrix transposed, as the parameters have."""
    padded: bool
    """Whether the stack has entries that no parameter has."""
    aligned: bool
    like: Tensor
    """Of the parameters' type."""
    weight_squares: Float32[Tensor, "K parts"] | None
    """Sums of squares of the weights of each matrix, part by part, as the last step left them; None where matrices
    have unlike numbers of parts."""

    @classmethod
    def of(cls, stack: Stack, slots: dict[int, int], rates: dict[str, int]) -> "StackPieces | None":
        """The tables, if the kernels take all of the stack's parameters; with the row of each parameter's rate."""
        shape, params, forms = stack.shape, stack.params, [spec.form for spec in stack.specs]
        dtypes = {p.dtype for p in params.values()}
        if shape.dtype != torch.float32 or len(dtypes) != 1 or not all(map(_takes, params.values())):
            return None
        transposed = not stack.requires.matrices_only and all(
            form.transposed and form.groups == 1 and form.bias is None for form in forms
        )
        layout, found = _Layout(shape.outputs, shape.inputs, transposed), list[Piece]()
        for spec, groups in stack.layers:
            for part in spec.form.parts:
                form, p = spec.form, params[part.name]
                if not p.is_contiguous() and (form.groups > 1 or part.rows is not None or form.transposed):
                    return None  # channels last, and several matrices
                at = (layout, groups.start, slots[id(p)], rates[part.name])
                found += (_of_weight if part is form.weight else _of_bias)(form, part, p, *at)
        covered = sum(min(piece.rows * piece.columns, piece.limit) for piece in found)
        tiles, counts = [piece.tiles(number) for number, piece in enumerate(found)], Counter[int]()
        for piece, own in zip(found, tiles, strict=True):
            counts[piece.group] += len(own)
        squares, alike = None, len(counts) == len(forms) == shape.groups and len({*counts.values()}) == 1
        if alike and stack.requires.matrices_only:
            squares = shape.zeros(counts[0] * (ROWS // FINISH[0]))
        return cls(
            stack,
            torch.tensor([astuple(piece) for piece in found]).to(shape.device),
            torch.cat(tiles).to(shape.device),
            transposed,
            covered < shape.groups * shape.outputs * shape.inputs,
            all(piece.aligned for piece in found),
            torch.empty(1, dtype=dtypes.pop(), device=shape.device),
            squares,
        )

    def room(self, dtype: torch.dtype) -> Float[Tensor, "K O I"]:
        """A stack to gather into."""
        shape, make = self.stack.shape, torch.zeros if self.padded else torch.empty
        sides = (shape.inputs, shape.outputs) if self.transposed else (shape.outputs, shape.inputs)
        found = make(shape.groups, *sides, dtype=dtype, device=shape.device)
        return found.mT if self.transposed else found

    def measure(self) -> None:
        """The weights, as they are now."""
        if self.weight_squares is not None:
            self.weight_squares.zero_()
            self.weight_squares[:, 0] = weight_norms(self.stack).square()

    def laid_out(self, X: Float[Tensor, "K O I"]) -> Float[Tensor, "K O I"]:
        """The same in the order of the pieces; as it is, where it has it."""
        return laid_out(X, self.transposed)

    def direction(self, D: Tensor | Scaled) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What a step subtracts, in that order, and what it is still to be divided by, group by group."""
        if isinstance(D, Scaled) and len(self.stack.specs) == self.stack.groups:
            return self.laid_out(D.C), D.scales
        return self.laid_out(unscaled(D)), ()  # a piece may have several groups


def laid_out(X: Float[Tensor, "K O I"], transposed: bool) -> Float[Tensor, "K O I"]:
    """The same, its matrices or their transposes each in one piece; as it is, where they are."""
    if transposed:
        return X if X.mT.is_contiguous() else X.mT.contiguous().mT
    return X.contiguous()


class Tables:
    """The addresses of all parameters and gradients of some stacks on one device, and their rates.

    `send` tells the device what has changed since the last step; the passes read what was sent. Where there are no
    kernels, no stack has pieces.
    """

    def __init__(self, stacks: Sequence[Stack], device: torch.device) -> None:
        self.device, self._stacks = device, stacks
        self.params = list({id(p): p for stack in stacks for p in stack.params.values()}.values())
        self.slots = {id(p): slot for slot, p in enumerate(self.params)}
        self._groups: list[tuple[Any, bool]] = []
        self._rows: dict[tuple[int, bool], int] = {}
        self._find()
        self.parameters = torch.zeros(len(self.params), dtype=torch.int64, device=device)
        self.gradients = torch.zeros_like(self.parameters)
        double = any(p.dtype == torch.float64 for p in self.params)
        self.rates = torch.zeros(len(self._groups), 2, dtype=torch.float64 if double else torch.float32, device=device)
        self._rate_rows = self.rates.unbind()
        self._sent: list[list[Any]] = [[], [], []]
        self._versions: list[int] = []
        """Of parameters whose norms are measured by the steps, if nobody else writes to them."""
        self.complete, self.aligned = False, False
        """Whether the kernels can read all gradients of this step; and by vectors, as what they write."""

    def _find(self) -> None:
        """The pieces of all stacks, by the types of their parameters and the order in which these lie in memory."""
        self.pieces: dict[int, StackPieces] = {}
        for stack in self._stacks:
            rows = {name: self._row(stack.own_groups.get(name, stack.group), stack.fallback) for name in stack.params}
            found = StackPieces.of(stack, self.slots, rows) if available(self.device) else None
            if found is not None:
                self.pieces[id(stack)] = found
        self._measured = [
            p for own in self.pieces.values() if own.weight_squares is not None for p in own.stack.params.values()
        ]
        listed = {id(p) for found in self.pieces.values() for p in found.stack.params.values()}
        self._expected = [(p, p.dtype, p.stride()) if id(p) in listed else (p, None, ()) for p in self.params]

    def _row(self, group: Any, fallback: bool) -> int:
        """Of a parameter group, in the table of rates; the fallback may have another rate."""
        key = (id(group), fallback)
        if key not in self._rows:
            self._rows[key] = len(self._groups)
            self._groups.append((group, fallback))
        return self._rows[key]

    # --- what the device is told ---------------------------------------------------------------------------

    def send(self) -> None:
        """Where parameters and gradients lie at this step, and at which rates they are moved."""
        former = self._sent[0]
        moved = self._put(self.parameters, 0, [p.data_ptr() for p in self.params])
        if moved and former:  # perhaps to another type or order: `model.to(memory_format=...)`
            self._find()
            self.forget_norms()
        addresses = list[int]()
        for p, dtype, strides in self._expected:
            grad = p.grad
            readable = grad is not None and grad.dtype is dtype and not grad.is_sparse and grad.stride() == strides
            addresses.append(grad.data_ptr() if readable and grad is not None else 0)
        if self._put(self.gradients, 1, addresses) or moved:
            self.complete = 0 not in addresses
            self.aligned = not any(address % 16 for numbers in self._sent[:2] for address in numbers)
        lrs = [(rate(group, fallback), group["weight_decay"]) for group, fallback in self._groups]
        self._put(self.rates, 2, [x for lr, decay in lrs for x in (1 - lr * decay, lr)])
        versions = [p._version for p in self._measured]
        if versions != self._versions:
            for own in self.pieces.values():
                own.measure()
        self._versions = [version + 1 for version in versions]  # as a step leaves them

    def forget_norms(self) -> None:
        """Of weights: a step is not made by the kernels."""
        self._versions = []

    def weight_norms(self, stack: Stack) -> Float[Tensor, "K"] | None:
        """As the last step left them, where that was measured; what somebody writes into ``p.data`` is seen one
        step later."""
        own = self.pieces.get(id(stack))
        known = own is not None and own.weight_squares is not None and stack.weight_norms is None
        return own.weight_squares.sum(1).sqrt() if known else None  # type: ignore[union-attr]

    def _put(self, table: Tensor, which: int, numbers: list[Any]) -> bool:
        """Whether there was anything to send. Nobody waits: torch keeps pinned memory until it has been copied."""
        if numbers == self._sent[which]:
            return False
        here = torch.tensor(numbers, dtype=table.dtype, pin_memory=self.device.type == "cuda")
        table.copy_(here.view_as(table), non_blocking=True)
        self._sent[which] = numbers
        return True

    @property
    def places(self) -> list[int]:
        """Where the parameters lie, as it was sent last: the same list, unless one has moved."""
        return self._sent[0]

    def rate_of(self, stack: Stack, name: str | None = None) -> Float[Tensor, "2"]:
        """``(1 − η·decay, η)`` of a stack, or of one of its parameters."""
        group = stack.group if name is None else stack.own_groups.get(name, stack.group)
        return self._rate_rows[self._rows[id(group), stack.fallback]]

    def reads(self, stack: Stack) -> StackPieces | None:
        """The stack's pieces, if the kernels can read all its gradients at this step."""
        found, sent = self.pieces.get(id(stack)), self._sent[1]
        if found is None or self.complete:
            return found
        return found if sent and all(sent[self.slots[id(p)]] for p in stack.params.values()) else None

    # --- passes --------------------------------------------------------------------------------------------

    def magnitudes(self, stacks: Iterable[StackPieces]) -> Float[Tensor, "n"]:
        """The largest magnitude of every gradient of some stacks, by slot; zero of others."""
        bits = torch.zeros(len(self.params), dtype=torch.int32, device=self.device)
        for own in stacks:
            aligned = own.aligned and self.aligned
            passes.magnitudes_(bits, own.tiles, own.table, self.gradients, own.like, aligned)
        return bits.view(torch.float32)

    def gather(
        self, own: StackPieces, factor: float, all_finite: Bool[Tensor, ""], largest: Float[Tensor, "K"] | None = None
    ) -> Float[Tensor, "K O I"] | Half:
        """A stack's gradients times a number; zeros in a step that is left out. In fp16 with room where the `largest`
        magnitudes are given."""
        out, aligned = own.room(torch.float32 if largest is None else torch.float16), own.aligned and self.aligned
        scale = None if largest is None else torch.empty_like(largest)
        at = (own.tiles, own.table, self.gradients, own.like)
        passes.gather_(out, *at, factor, all_finite, scale, largest, aligned)
        return out if scale is None else Half(out, scale)

    def finish_(
        self,
        own: StackPieces,
        D: Tensor | Scaled,
        momentum: Float[Tensor, "K O I"] | None,
        mu: float,
        nesterov: bool,
        factor: Tensor | None,
        all_finite: Bool[Tensor, ""],
    ) -> None:
        """Momentum, decay and descent."""
        if momentum is not None and not (momentum.mT if own.transposed else momentum).is_contiguous():
            raise InputError(
                describe(
                    f"momentum with strides {momentum.stride()}", "the order of the pieces", "lay it out by `laid_out`"
                )
            )
        (C, scales), aligned = own.direction(D), own.aligned and self.aligned
        factor = None if factor is None else factor.to(self.device, torch.float32)
        passes.finish_(
            own.tiles, own.table, self.parameters, own.like, C, scales, momentum, self.rates, mu, nesterov, factor,
            all_finite, own.weight_squares, aligned,
        )  # fmt: skip
        # Autograd sees changes that torch makes; those of a kernel it must be told of.
        torch.autograd.graph.increment_version([*own.stack.params.values()])

    def adamw_(
        self,
        own: StackPieces,
        moments: tuple[Float[Tensor, "K O I"], Float[Tensor, "K O I"]],
        corrections: tuple[Float[Tensor, "K"], Float[Tensor, "K"]],
        scale: float,
        betas: tuple[float, float],
        eps: float,
        all_finite: Bool[Tensor, ""],
    ) -> None:
        """AdamW's whole step, of gradients that were not gathered."""
        passes.adamw_(
            own.tiles, own.table, (self.gradients, self.parameters), own.like, moments, corrections, self.rates, scale,
            betas, eps, all_finite, own.aligned and self.aligned,
        )  # fmt: skip
        torch.autograd.graph.increment_version([*own.stack.params.values()])
