"""The Hessian of a loss: products by differentiating the gradient, and the structures that exist for it.

It is indefinite in general: a solve needs enough damping to make it positive definite, and says how much.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.curvature.block_diagonal import BlockDiagonal
from layerwise.curvature.matrix import SMALL, DenseMatrix, ParamMatrix
from layerwise.curvature.restricted import Restricted
from layerwise.foundations.columns import Params, Shapes, as_rows, from_flat, to_flat
from layerwise.foundations.device import require
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.operators import Block, BlockOperator, Diagonal
from layerwise.foundations.types import statistics_dtype
from layerwise.foundations.vectors import ParamVector, trainable
from layerwise.layers.capture.linearize import forward, twice_differentiable
from layerwise.layers.capture.model_call import in_own_arithmetic, refuse_empty
from layerwise.layers.capture.recorder import Batch, ModelRecorder
from layerwise.layers.capture.source import Source
from layerwise.layers.capture.tape import explained
from layerwise.layers.capture.vectorised import batched_grad
from layerwise.layers.parts import find_layer, layers_of
from layerwise.layers.table import LayerTable

COLUMNS = 32
"""Products that are made at once."""

BatchLoss = Callable[[Tensor, Batch, int], Tensor]
"""``(output, batch, N) -> Σ_n ℓ_n``: the batch's loss as a sum over its examples."""


@dataclass(frozen=True, eq=False)
class HessianProducts:
    """Goes over the data and multiplies by the Hessian of ``1/N Σ ℓ_n``."""

    model: nn.Module
    recorder: ModelRecorder
    source: Source
    loss: BatchLoss

    def gradients(self, names: list[str]) -> Iterator[tuple[list[nn.Parameter], list[Tensor], int]]:
        """For each batch: parameters, their differentiable gradients, and the number of examples."""
        chosen = {k: p for k, p in trainable(self.model).items() if k in names}
        with self.recorder.session():
            for batch in self.source.batches("hessian"):
                n = self.recorder.likely_examples(batch)
                refuse_empty(n)
                self.recorder.check_batch(batch)
                self.recorder.seed_forward(batch)
                with torch.enable_grad(), twice_differentiable(), explained():
                    f = forward(self.model, dict(chosen), batch.x)
                    self.recorder.check_output(f, batch)
                    total = self.loss(f, batch, n)
                    grads = torch.autograd.grad(total, list(chosen.values()), create_graph=True, allow_unused=True)
                yield (
                    list(chosen.values()),
                    [torch.zeros_like(p) if g is None else g for g, p in zip(grads, chosen.values(), strict=True)],
                    self.recorder.likely_examples(batch),  # a likelihood has had the model examined
                )

    @in_own_arithmetic
    def product(self, params: Params, names: list[str] | None = None) -> Params:
        """``H v`` (or its block on `names`) for columns ``{parameter: [B, *shape]}``."""
        names = names or list(params)
        params = {k: t.clone() if t.is_inference() else t for k, t in params.items()}
        total = {k: torch.zeros_like(params[k]) for k in names}
        examples = 0
        for chosen, grads, n in self.gradients(names):
            examples += n
            live = [(g, params[k]) for k, g in zip(names, grads, strict=True) if g.requires_grad]
            if not live:
                continue
            v = torch.cat([as_rows(t) for _, t in live], dim=1)
            with torch.enable_grad(), twice_differentiable(), explained():
                g = torch.cat([g.flatten() for g, _ in live])
                v = v.to(g.dtype)
                columns = batched_grad(g, chosen, v, retain_graph=False)
            for k, column in zip(names, columns, strict=True):
                if column is not None:
                    total[k] += column
        return {k: t / examples for k, t in total.items()}


@dataclass(frozen=True, eq=False, repr=False)
class ImplicitHessian(ParamMatrix):
    """Products by autodiff; nothing is kept."""

    products: HessianProducts
    table: LayerTable
    memory: int | None = None
    structure = "implicit"

    @property
    def shapes(self) -> Shapes:  # type: ignore[override]
        """Of the parameters."""
        return self.table.shapes

    @property
    def dtype(self) -> torch.dtype:
        """Of the statistics."""
        return statistics_dtype(self._parameter().dtype)

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return self._parameter().device

    @property
    def is_psd(self) -> bool:
        """Not known."""
        return False

    def _parameter(self) -> Tensor:
        return next(p for p in self.products.model.parameters() if p.requires_grad)

    def _mv(self, params: Params) -> Params:
        return self.products.product({k: params[k] for k in self.shapes})

    def _dense(self) -> DenseMatrix:
        return dense(self)

    def trace(self, samples: int = 64, seed: int = 0) -> Tensor:
        """Exact for few parameters; otherwise an estimate with its standard error."""
        return self._dense().trace() if self.numel() <= SMALL else super().trace(samples, seed)

    def frobenius(self, samples: int = 64, seed: int = 0) -> Tensor:
        """Exact for few parameters; otherwise an estimate with its standard error."""
        return self._dense().frobenius() if self.numel() <= SMALL else super().frobenius(samples, seed)

    def diagonal(self, samples: int = 64, seed: int = 0) -> ParamVector:
        """Exact for few parameters; otherwise an estimate with its standard error."""
        return self._dense().diagonal() if self.numel() <= SMALL else super().diagonal(samples, seed)

    def layer(self, name: str) -> Restricted:
        """The block of one layer, still without forming it."""
        return Restricted(self, find_layer(layers_of(self.table), self.shapes, name), self.memory)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "ImplicitHessian":
        """Not possible: the matrix lives where its model does."""
        raise InputError(
            describe("to() of an implicit matrix", "the model's own device and dtype", "move the model and rebuild")
        )


def _columns(shapes: Shapes, like: Tensor) -> Iterator[tuple[slice, Params]]:
    """Columns of the identity, a few at a time."""
    d = sum(torch.Size(shape).numel() for shape in shapes.values())
    for start in range(0, d, COLUMNS):
        stop = min(start + COLUMNS, d)
        eye = torch.zeros(stop - start, d, dtype=like.dtype, device=like.device)
        eye[torch.arange(stop - start), torch.arange(start, stop)] = 1
        yield slice(start, stop), from_flat(eye, shapes)


def dense(implicit: ImplicitHessian) -> DenseMatrix:
    """All of it, column by column."""
    implicit._require_dense()
    like = torch.zeros((), dtype=implicit.dtype, device=implicit.device)
    matrix = torch.zeros(implicit.numel(), implicit.numel(), dtype=like.dtype, device=like.device)
    for columns, params in _columns(implicit.shapes, like):
        matrix[:, columns] = to_flat(implicit._mv(params), implicit.shapes).mT
    layers = layers_of(implicit.table)
    return DenseMatrix((matrix + matrix.mT) / 2, implicit.shapes, False, None, layers, implicit.memory)


def by_layer(implicit: ImplicitHessian, structure: str, memory: int) -> BlockDiagonal:
    """Exact diagonal blocks, or the diagonal (exact for few parameters, else estimated)."""
    like = torch.zeros((), dtype=implicit.dtype, device=implicit.device)
    if structure == "diag":
        found = implicit.diagonal()
        blocks = implicit.table.to_blocks({k: t.unsqueeze(0) for k, t in found.items()})
        operators: dict[str, BlockOperator] = {k: Diagonal(X[0], psd=False) for k, X in blocks.items()}
        return BlockDiagonal(implicit.table, operators, "diag", memory=memory, diagonal_error=found.standard_error)
    operators = {}
    needed = sum(2 * spec.form.numel() ** 2 * like.itemsize for spec in implicit.table.layers)
    require(needed, memory, 'structure "block" of the Hessian', 'use structure="diag" or "implicit"')
    for spec in implicit.table.layers:
        shapes = {k: implicit.shapes[k] for k in dict.fromkeys(spec.parameters)}
        matrix = like.new_zeros(spec.form.numel(), spec.form.numel())
        for columns, params in _joined_columns(spec.form, like, shapes):
            out = implicit.products.product(params, list(shapes))
            matrix[:, columns] = spec.form.join(out).flatten(1).mT
        operators[spec.name] = Block(((matrix + matrix.mT) / 2).unsqueeze(0), spec.form.shape, psd=False)
    return BlockDiagonal(implicit.table, operators, "block", memory=memory)


def _joined_columns(form: Any, like: Tensor, shapes: Shapes) -> Iterator[tuple[slice, Params]]:
    """Columns of the identity in the block's own order."""
    d = form.numel()
    for start in range(0, d, COLUMNS):
        stop = min(start + COLUMNS, d)
        eye = torch.zeros(stop - start, d, dtype=like.dtype, device=like.device)
        eye[torch.arange(stop - start), torch.arange(start, stop)] = 1
        params = {k: like.new_zeros(stop - start, *shape) for k, shape in shapes.items()}
        for part, tensor in form.split(eye.view(-1, *form.shape)):
            part.of(params).copy_(tensor)
        yield slice(start, stop), params
