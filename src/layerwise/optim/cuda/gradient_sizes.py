"""How large a step's gradients are, by the pass that tells whether they are finite; nothing is asked of the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.optim.cuda.pieces import Tables
from layerwise.optim.step.stack import Stack

MOST_GRADIENT = 1e19
"""From which on an entry counts as not finite: moments are of squares, and these would not be in float32."""


@dataclass
class GradientSizes:
    """Of the gradients on one device."""

    finite: Tensor
    largest: Tensor
    places: dict[int, int]
    """Where the largest magnitude of a parameter's gradient is found, by the parameter's id."""


def sizes_of(stacks: Sequence[Stack], tables: Tables) -> GradientSizes | None:
    """The largest magnitude of every gradient that stacks on one device have, if there is one."""
    pieces = [own for stack in stacks if (own := tables.reads(stack)) is not None]
    by_table = {id(p) for own in pieces for p in own.stack.params.values()}
    grads = {id(p): p.grad for p in tables.params if p.grad is not None and id(p) not in by_table}
    grads = {name: grad.coalesce().values() if grad.is_sparse else grad for name, grad in grads.items()}
    grads = {name: grad for name, grad in grads.items() if grad.numel()}
    largest, places = list[Tensor](), dict[int, int]()
    if pieces:
        largest.append(tables.magnitudes(pieces))
        places |= {name: tables.slots[name] for name in by_table}
    if grads:
        before = len(tables.params) if pieces else 0
        largest.append(largest_of_each([*grads.values()]))
        places |= {name: before + at for at, name in enumerate(grads)}
    if not largest:
        return None
    whole = largest[0] if len(largest) == 1 else torch.cat(largest)
    return GradientSizes((whole < MOST_GRADIENT).all(), whole, places)


@torch.no_grad()
def largest_of_each(tensors: Sequence[Float[Tensor, "..."]]) -> Float[Tensor, "T"]:
    """Largest magnitudes of tensors that are not empty, in float32 or more.

    >>> largest_of_each([torch.tensor([1.0, -3.0]), torch.ones(2, 2).bfloat16()])
    tensor([3., 1.])
    """
    norms = torch.stack(torch._foreach_norm([*tensors], torch.inf))  # pyright: ignore[reportPrivateImportUsage]
    return norms.to(torch.promote_types(norms.dtype, torch.float32))


def bounds(
    stacks: Sequence[Stack], sizes: GradientSizes, all_finite: Tensor, scale: float, memory: dict[str, Any]
) -> dict[int, Tensor]:
    """What no entry of each group's gradient exceeds, ``[K]`` by the stack's id: ``|scale|`` times the largest of its
    layer's, or zero in a step that is left out, as the gradient itself is there.

    A stack of which some gradient is missing has none. `memory` keeps on the device which numbers belong together.
    """
    wanted, key = [], []
    for stack in stacks:
        places = [sizes.places.get(id(p), -1) for p in stack.params.values()]
        if min(places) >= 0:
            wanted.append(stack)
            key.append((id(stack), *places))
    if not wanted:
        return {}
    if memory.get("key") != key:
        memory.update(key=key, index=_index(wanted, sizes).to(all_finite.device, non_blocking=True))
    found = sizes.largest[memory["index"]].amax(1)
    found = torch.where(all_finite, found if scale == 1.0 else found * abs(scale), 0.0).float()
    pieces = found.split([stack.groups for stack in wanted])
    return {id(stack): piece for stack, piece in zip(wanted, pieces, strict=True)}


def _index(stacks: Sequence[Stack], sizes: GradientSizes) -> Tensor:
    """The places of each group's parameters, a row a group; one is repeated where others have more."""
    rows = []
    for stack in stacks:
        for spec in stack.specs:
            places = [sizes.places[id(stack.params[name])] for name in spec.parameters]
            rows += [places] * spec.form.groups
    most = max(len(row) for row in rows)
    return torch.tensor([row + row[:1] * (most - len(row)) for row in rows])
