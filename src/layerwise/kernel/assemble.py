"""From sides to the matrix: every layer's contraction, in tiles, each pair of examples once."""

from collections.abc import Iterator, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.linalg import accumulate_gram, mirror_
from layerwise.foundations.progress import Progress
from layerwise.kernel.contraction import contract
from layerwise.kernel.examples import Block, Examples
from layerwise.kernel.outputs import Outputs
from layerwise.kernel.plan import LayerPlan, Plan, with_positions
from layerwise.kernel.sides import Calls, LayerSide, Side, record_side
from layerwise.layers.capture.recorder import ModelRecorder
from layerwise.layers.io.standard import Standard

COLUMNS = 8192
"""Entries of per-example gradients multiplied at a time: longer sums lose digits in float32."""
APART = 2**18
"""Entries of a total up to which each product is made apart and added then: a BLAS may add to a total term by term, and
that sum would be as long as all of them together, however they are cut."""
WHOLE = ""
"""The name of the sum of all layers."""


def assemble(
    recorder: ModelRecorder,
    first: Examples,
    second: Examples | None,
    outputs: Outputs,
    plan: Plan,
    progress: Progress,
) -> dict[str, Float[Tensor, "NP MP"]]:
    """The kernel's matrix, under the name `WHOLE`, or one matrix a layer; inside a session of the recorder."""
    r = plan.request
    names = [layer.spec.name for layer in plan.layers] if r.apart else [WHOLE]
    shape = (r.n * r.functions, (r.n if r.m is None else r.m) * r.functions)
    totals = {name: torch.zeros(shape, dtype=r.dtype, device=r.device) for name in names}
    pairs = _pairs_of_groups(first, second, plan)
    left = right = None
    for left_blocks, right_blocks in progress.track(pairs, "tangent kernel", len(pairs)):
        right = None  # freed before the next is made
        if left is None or left.start != left_blocks[0].start:
            left = None
            left = record_side(recorder, left_blocks, plan, outputs)
        right = left if right_blocks is None else record_side(recorder, right_blocks, plan, outputs)
        _add_pair(totals, left, right, plan)
    for total in totals.values():
        if r.m is None:
            mirror_(total)
    return totals


def _pairs_of_groups(
    first: Examples, second: Examples | None, plan: Plan
) -> list[tuple[list[Block], list[Block] | None]]:
    """Groups of blocks to be contracted; the second is None where it is the first itself."""
    left = list(_groups(first.blocks, plan.groups[0]))
    if second is None:
        return [(a, None if i == j else left[j]) for i, a in enumerate(left) for j in range(i, len(left))]
    right = list(_groups(second.blocks, plan.groups[1]))
    return [(a, b) for a in left for b in right]


def _groups(blocks: list[Block], size: int) -> Iterator[list[Block]]:
    """Consecutive blocks that hold at most `size` examples together."""
    group: list[Block] = []
    for block in blocks:
        if group and block.stop - group[0].start > size:
            yield group
            group = []
        group.append(block)
    yield group


def _add_pair(totals: Mapping[str, Tensor], left: Side, right: Side, plan: Plan) -> None:
    P = plan.request.functions
    for layer in plan.layers:
        name = layer.spec.name
        if name not in left.layers or name not in right.layers:
            continue
        total = totals[name if plan.request.apart else WHOLE]
        part = total[left.start * P : left.stop * P, right.start * P : right.stop * P]
        same = left is right and plan.request.m is None
        first, second = left.layers[name], right.layers[name]
        if isinstance(first, Calls) and isinstance(second, Calls):
            layer = with_positions(layer, max(first.live_count(), second.live_count()), plan.request)
        add_layer(part, layer, first, second, same)


def add_layer(total: Float[Tensor, "NP MP"], layer: LayerPlan, left: LayerSide, right: LayerSide, same: bool) -> None:
    """Add one layer's kernel; where both sides are the `same`, its upper half alone."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        _add_rows(total, left.flatten(1), right.flatten(1), same)
        return
    if isinstance(left, Tensor) or isinstance(right, Tensor):  # some examples of one side leave the layer out
        _add_rows(total, _as_rows(left).flatten(1), _as_rows(right).flatten(1), same)
        return
    P = layer.sizes.vectors
    for i, i2 in _tiles(left, layer):
        first = left.standard(i, i2)
        for j, j2 in _tiles(right, layer):
            if same and j < i:
                continue
            second = first if same and j == i else right.standard(j, j2)
            part = total[i * P : i2 * P, j * P : j2 * P].view(i2 - i, P, j2 - j, P)
            _add_tile(part, layer, first, second)


def _as_rows(side: LayerSide) -> Float[Tensor, "D N V"]:
    if isinstance(side, Tensor):
        return side
    grads = side.standard(0, side.io.examples).per_example_grads().flatten(2)
    return grads.permute(2, 1, 0).contiguous()


def _add_tile(total: Float[Tensor, "N V M W"], layer: LayerPlan, left: Standard, right: Standard) -> None:
    V, step = layer.sizes.vectors, layer.cost.vector_tile
    for v in range(0, V, step):
        some = left if step >= V else Standard(left.a, left.g[v : v + step])
        for w in range(0, V, step):
            others = right if step >= V else Standard(right.a, right.g[w : w + step])
            total[:, v : v + step, :, w : w + step] += contract(layer.order, some, others)


def _tiles(side: Calls, layer: LayerPlan) -> Iterator[tuple[int, int]]:
    """First and last example of each."""
    for start in range(0, side.io.examples, layer.cost.tile):
        yield start, min(start + layer.cost.tile, side.io.examples)


def _add_rows(total: Tensor, R: Float[Tensor, "D a"], R2: Float[Tensor, "D b"], same: bool) -> None:
    for start in range(0, R.shape[0], COLUMNS):
        X, Y = R[start : start + COLUMNS], R2[start : start + COLUMNS]
        if total.numel() <= APART:
            total += X.mT @ Y
        elif same:
            accumulate_gram(total, X)
        else:
            total.addmm_(X.mT, Y)
