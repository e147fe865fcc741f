"""Stacks of linear layers by themselves, without a model or an optimizer, and the executor that moves them: what tests
of passes over parameters share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.distributed.processes import Processes
from layerwise.layers.form import Form, Part
from layerwise.layers.table import LayerSpec
from layerwise.optim.cuda.device_step import DeviceStep
from layerwise.optim.cuda.executor import AsynchronousExecutor
from layerwise.optim.cuda.pieces import Tables
from layerwise.optim.cuda.scaled import Scaled
from layerwise.optim.elementwise import GradientDescent
from layerwise.optim.reference import Reference
from layerwise.optim.rule import Context, Health, Requirements, UpdateRule
from layerwise.optim.statistics.accumulate import Accumulator
from layerwise.optim.step import update
from layerwise.optim.step.clip import Clip
from layerwise.optim.step.damping import Damping
from layerwise.optim.step.graft import Graft
from layerwise.optim.step.stack import Stack
from layerwise.optim.step.update import UpdateSize


@dataclass(frozen=True)
class Padding(Reference):
    """So many zeros below and beside each matrix."""

    zeros: tuple[int, int] = (0, 0)

    def padding(self, requirements: Requirements, O: int, I: int, like: Tensor, one_hot: bool) -> tuple[int, int]:
        """Whatever the sizes are."""
        return self.zeros


def options(**given: Any) -> dict[str, Any]:
    """A parameter group."""
    return {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False, **given}


def stack_of(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
    *,
    padding: tuple[int, int] = (0, 0),
    transposed: bool = False,
    grads: Sequence[Tensor] | None = None,
    own_groups: dict[str, dict[str, Any]] | None = None,
    rule: UpdateRule | None = None,
    **given: Any,
) -> Stack:
    """One layer a weight, ``[O, I]`` or as embeddings have it, `transposed`, ``[I, O]``; parameters are the tensors
    themselves. `grads` are those of all weights, then of all biases. What else is `given` is the group's."""
    params, specs = dict[str, nn.Parameter](), []
    for k, W in enumerate(weights):
        o, i = (W.shape[1], W.shape[0]) if transposed else W.shape
        parts = Part(f"{k}.weight", tuple(W.shape)), None if biases is None else Part(f"{k}.bias", (o,))
        specs.append(LayerSpec(str(k), Form(1, o, i, *parts, transposed=transposed), "Linear"))
        params[f"{k}.weight"] = nn.Parameter(W)
        if biases is not None:
            params[f"{k}.bias"] = nn.Parameter(biases[k])
    if grads is not None:
        ordered = [f"{k}.{part}" for part in ("weight", "bias") for k in range(len(weights))]
        for name, grad in zip(ordered, grads, strict=False):
            params[name].grad = grad
    stack = Stack(rule or GradientDescent(), tuple(specs), options(**given), params, Padding(zeros=padding))
    stack.own_groups = {name: options(**group) for name, group in (own_groups or {}).items()}
    return stack


class Passes:
    """The two ends of a step of some stack, as the executor takes them: by kernels where there are some."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        accumulator = Accumulator(stack.requires, "expand", Processes())
        others = (Damping(1.0, "relative"), Clip(), Graft(), UpdateSize(), accumulator, 1)
        self.executor = AsynchronousExecutor([stack], stack.rule, Health(), *others)
        self.tables.send()

    @property
    def tables(self) -> Tables:
        """Where parameters and gradients lie."""
        return self.executor.tables[self.stack.shape.device]

    @property
    def by_kernels(self) -> bool:
        """Whether the kernels take the stack and its gradients."""
        return self.tables.reads(self.stack) is not None

    @torch.no_grad()
    def gather(self, scale: float, all_finite: Tensor) -> Tensor:
        """All gradients times a number."""
        found = self.executor._gradient(self.stack, scale, all_finite, None)[0]
        assert isinstance(found, Tensor)
        return found

    @torch.no_grad()
    def finish_(self, D: Tensor | Scaled, all_finite: Tensor, factor: float | Tensor = 1.0) -> None:
        """Momentum, decay and descent."""
        context = Context(1, self.stack.group["lr"], 0.0, True, {}, device_step=DeviceStep(all_finite))
        room = torch.empty(0)  # the gradient is not looked at
        part = update.Part(self.stack, context, room, [True] * len(self.stack.specs), room)
        self.executor._finish(part, D, factor)
