"""`check_approximation`: a structure of the Fisher matrix keeps what its theory promises, layer by layer."""

from typing import Any

import torch
from torch import Tensor

from layerwise.curvature.block_diagonal import BlockDiagonal
from layerwise.curvature.build import fisher
from layerwise.curvature.matrix import ParamMatrix
from layerwise.foundations.operators import BlockOperator
from layerwise.layers.table import LayerTable
from layerwise.testing import oracles
from layerwise.testing.cases import Case
from layerwise.testing.contracts.agreement import Agreement

EXACT = ("dense", "lowrank", "implicit")
"""Structures that keep the whole matrix."""
EXACT_BLOCK = ("block",)
EXACT_DIAGONAL = ("diag", "quasidiag", "block", "group")
EXACT_TRACE = (*EXACT_DIAGONAL, "ekfac")


def check_approximation(structure: str, case: Case, *, seed: int = 0, tol: float = 1e-8) -> None:
    """Check a structure of `lw.fisher` (exact estimator) on a case against the dense oracle.

    Every layer's operator must be positive semi-definite, and keep of the oracle's block what the structure
    promises: all of it ("block", and groups apart "group", which K-FAC gives to norm layers), its diagonal ("diag",
    "quasidiag"), its trace ("ekfac", whose error is also never above K-FAC's).

    >>> from layerwise.testing import case
    >>> check_approximation("ekfac", case("mlp"))

    Raises:
        AssertionError: naming structure, case, layer and what differs.
    """
    model, x, y = case.make(seed)
    agree = Agreement(f"structure {structure!r} on case {case.name!r}", tol)
    truth = oracles.fisher(model, x, y, **case.oracle_options)
    F = _fisher(case, (model, x, y), structure)
    if structure in EXACT:
        agree.close(F.to_dense(), truth, "the whole matrix")
        return
    assert isinstance(F, BlockDiagonal)
    blocks = _blocks(F.table, truth)
    kfac = _fisher(case, (model, x, y), "kfac") if structure == "ekfac" else None
    for spec in F.table.layers:
        kept = spec.structure(structure)
        layer = Agreement(f"{agree.subject}, layer {spec.name!r} ({kept})", tol)
        op, block = F.operators[spec.name], blocks[spec.name]
        _check_definite(layer, op)
        _check_promises(layer, op, block, kept)
        if isinstance(kfac, BlockDiagonal) and kept == "ekfac":
            ours, theirs = (_error(m.operators[spec.name], block) for m in (F, kfac))
            worst = theirs + tol * float(block.norm())
            layer.require(ours <= worst, f"its error {ours:.6g} is above K-FAC's, {theirs:.6g}")
    diagonal = torch.cat([t.reshape(-1) for t in F.diagonal().values()])
    if all(spec.structure(structure) in EXACT_DIAGONAL for spec in F.table.layers):
        agree.close(diagonal, truth.diagonal(), "the diagonal in flat order")
    agree.close(F.trace(), diagonal.sum(), "the trace, against the sum of the diagonal,")


def _fisher(case: Case, made: tuple, structure: str) -> ParamMatrix:
    model, x, y = made
    options = {k: v for k, v in case.options.items() if k not in ("mask", "examples")}
    mask = case.options.get("mask")
    data = (x, y) if mask is None else (x, y, mask)
    chosen: dict[str, Any] = {"completion": "psd"} if structure == "quasidiag" else {}
    return fisher(model, data, case.likelihood, structure, "exact", **chosen, **options)


def _blocks(table: LayerTable, truth: Tensor) -> dict[str, Tensor]:
    """The oracle's diagonal blocks, entries in the order of ``[K, O, I]``."""
    eye = torch.eye(len(truth), dtype=truth.dtype)
    columns = {name: eye[:, where].unflatten(1, table.shapes[name]) for name, where in _where(table).items()}
    chosen = {name: block.flatten(1) for name, block in table.to_blocks(columns).items()}
    return {name: P.mT @ truth @ P for name, P in chosen.items()}


def _where(table: LayerTable) -> dict[str, slice]:
    start, where = 0, {}
    for name, shape in table.shapes.items():
        size = torch.Size(shape).numel()
        where[name] = slice(start, start + size)
        start += size
    return where


def _check_definite(layer: Agreement, op: BlockOperator) -> None:
    layer.require(op.is_psd, "is_psd is False")
    values = torch.linalg.eigvalsh(op.as_matrix())
    lowest, highest = float(values[0]), float(values[-1])
    layer.require(lowest >= -layer.tol * max(highest, 1e-30), f"has an eigenvalue {lowest:.3g} (largest {highest:.3g})")


def _check_promises(layer: Agreement, op: BlockOperator, block: Tensor, kept: str) -> None:
    if kept in EXACT_TRACE:
        layer.close(op.trace(), block.diagonal().sum(), "the trace, against the oracle's,")
    if kept in EXACT_DIAGONAL:
        layer.close(op.diagonal(), block.diagonal().view(op.shape), "the diagonal, against the oracle's,")
    if kept in EXACT_BLOCK:
        layer.close(op.as_matrix(), block, "the block, against the oracle's,")
    if kept == "group":
        size = op.numel() // op.shape[0]
        groups = block.view(op.shape[0], size, op.shape[0], size)
        own = torch.stack([groups[k, :, k] for k in range(op.shape[0])])
        layer.close(op.as_matrix(), torch.block_diag(*own), "the blocks of its groups, against the oracle's,")


def _error(op: BlockOperator, block: Tensor) -> float:
    return float((op.as_matrix() - block).norm())
