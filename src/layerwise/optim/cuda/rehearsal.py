"""A first step without data: which kernels the steps of an optimizer will launch, so that they are compiled ahead.

Stacks of the same shapes on the device "meta" go through the same code as a step; nothing is computed, and each launch
only says which kernel it would run (`triton.ahead`). That takes the host 0.1 to 0.3 s.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import fields
from itertools import product
from typing import Any

import torch
from torch import nn

from layerwise.optim.cuda.backend import CudaBackend
from layerwise.optim.cuda.deferred_statistics import PendingRows
from layerwise.optim.cuda.executor import AsynchronousExecutor
from layerwise.optim.cuda.rows import Rows, StackRows, has_plain_form
from layerwise.optim.cuda.triton import ahead
from layerwise.optim.cuda.triton.device import available
from layerwise.optim.rule import Context, Health, Observation
from layerwise.optim.step.stack import Stack

TOKENS = (256, 8192)
"""Rows of a layer in a batch, few and many: sums over many may be divided among programs, by another kernel."""
SHAPE_FIELDS = ("dtype", "one_hot", "taps", "bias")
HALF = torch.bfloat16
"""What layers compute in, where that is not known."""


def stand_ins(params: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Parameters like these, with gradients, all without data."""
    found = {}
    for name, p in params.items():
        found[name] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        found[name].grad = torch.empty_like(p, device="meta") if p.requires_grad else None
    return found


def kind_of(stack: Stack) -> Hashable:
    """What kernels tell stacks apart by, as far as it can be seen: divisible sizes, about how large they are, forms."""
    shape, forms = stack.shape, [spec.form for spec in stack.specs]
    sides = (shape.outputs, shape.inputs)
    sizes = ((side.bit_length(), side % ahead.ALIGNED == 0) for side in sides)
    layout = tuple((form.transposed, form.cut, form.groups > 1, len(form.parts)) for form in forms)
    rule = (id(stack.rule), stack.fallback, stack.group["momentum"])  # by which averages have their type, too
    return rule, tuple(sizes), min(sides) == 1, layout, len(forms), *(getattr(shape, f) for f in SHAPE_FIELDS)


@torch.no_grad()
def rehearse(
    make: Callable[[], AsynchronousExecutor], context_of: Callable[[Stack], Context], device: torch.device
) -> Exception | None:
    """Begin to compile what the steps of an executor launch, whose stacks have `stand_ins`, and what making it does.

    Returns what has stopped that, if anything has: kernels that are not found here are compiled at their first launch.
    """
    if not available(device):
        return None
    try:
        with ahead.listing(device):
            _steps(make(), context_of)
    except Exception as error:  # a rule may ask for values, as a user's own may
        return error
    return None


class _Taken(Context):
    """Of a step that is taken, for who would ask the device."""

    def is_taken(self) -> bool:
        return True


def _steps(executor: AsynchronousExecutor, context_of: Callable[[Stack], Context]) -> None:
    """A first step, and one that goes on from there where bases have begun."""
    executor.health = Health(on_device=True)
    for tables in executor.tables.values():
        tables.complete = tables.aligned = True
    contexts, sizes = list[Context](), set[int]()
    for stack in executor.stacks:
        numbers = {f.name: getattr(context_of(stack), f.name) for f in fields(Context)}
        contexts.append(_Taken(**numbers | {"step": 1, "observes": True, "health": executor.health}))
    parts, first = executor.parts(contexts, executor.gather(1.0)), True
    while parts:
        for part in parts:
            stack, rule = part.stack, part.stack.rule
            for seen in _statistics(stack) if first and rule is executor.rule else ():  # the same at every step
                rule.observe(stack.state, seen, part.context)
                rows = seen.A if seen.G is None else seen.G
                if executor.statistics.over > 1 and isinstance(rows, StackRows):  # and layer by layer
                    PendingRows.of(slice(0, 1), (), 1, seen, part.context).take_in(stack)
            executor.learn_gradient(part)
            if stack.requires.refreshes and not {stack.shape.outputs, stack.shape.inputs} <= sizes:
                rule.refresh(stack.state, slice(0, stack.groups), part.context)
                sizes |= {stack.shape.outputs, stack.shape.inputs}  # sides of one size are treated alike
        executor.descend(parts)
        bases = [part for part in parts if part.stack.requires.refreshes and part.stack.requires.powers != (1.0, 1.0)]
        parts, sizes, first = [part for part in bases if not all(part.stack.memory["fresh"])], set[int](), False
        for part in parts:
            part.stack.memory["fresh"] = [True] * part.stack.groups


def _statistics(stack: Stack) -> Iterator[Observation]:
    """What a batch may give: rows in half or single precision of layers that have such, else moments."""
    requires, shape, state = stack.rule.requirements(stack.shape), stack.shape, stack.state
    assert isinstance(stack.backend, CudaBackend)
    if not (requires.inputs or requires.outgrads) or not requires.moments:
        return
    how: Any = {"known": [True] * shape.groups, "examples": 1, "groups": [spec.form.groups for spec in stack.specs]}
    kept = all(has_plain_form(spec.form) for spec in stack.specs)
    if not kept or stack.backend.precision != "half":  # layers that compute in single precision give moments
        A, G = (state[side].dense() if side in state else None for side in ("Q", "P"))
        yield Observation(A if requires.inputs else None, G if requires.outgrads else None, **how)
    if not kept:
        return
    bias = stack.specs[0].form.bias is not None
    for tokens, dtype in product(TOKENS, (HALF, torch.float32)):
        A = _rows(len(stack.specs), tokens, shape.own_inputs - bias, dtype, bias) if requires.inputs else None
        G = _rows(len(stack.specs), tokens, shape.own_outputs, HALF) if requires.outgrads else None
        yield Observation(A, G, **how)


def _rows(layers: int, tokens: int, width: int, dtype: torch.dtype, bias: bool = False) -> StackRows:
    return StackRows([Rows(torch.empty(tokens, width, dtype=dtype, device="meta"), HALF, 1.0, bias)] * layers, tokens)
