"""Hooks on a model's root: kept out of its copies, and out of the compiler's graphs."""

import functools
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from layerwise.foundations.types import Tree

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@contextmanager
def within_call(module: nn.Module, last: int) -> Iterator[None]:
    """Inside a call of a module: its inputs have seen the user's hooks, and its output will see those after ours."""
    kept = {name: vars(module)[name] for name in HOOKS}
    earlier = itertools.takewhile(lambda hook: hook[0] != last, kept["_forward_hooks"].items())
    try:
        vars(module).update({name: OrderedDict() for name in HOOKS}, _forward_hooks=OrderedDict(earlier))
        yield
    finally:
        vars(module).update(kept)


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tree:
    """What the model was called with, as one tree."""
    if kwargs and args:
        return (*args, kwargs)
    return kwargs or (args[0] if len(args) == 1 else args)


WHOLE_GRAPH = (
    "layerwise takes statistics in a hook on the model, between two compiled graphs. "
    "Expected torch.compile(model) without fullgraph=True. "
    "Leave fullgraph=True out, or take a member without statistics of its own (Shampoo, SOAP, Muon, Adam, SGD)."
)
"""What a user reads, inside the compiler's own error, who compiles the model as one graph."""


def outside_the_compiler(call: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the compiler out of a hook; unlike `torch.compiler.disable`, import it at the first call only."""
    made: list[Any] = []

    @functools.wraps(call)
    def inner(*args: Any) -> Any:
        if not made:
            made.append(torch.compiler.disable(call, reason=WHOLE_GRAPH))
        return made[0](*args)

    inner.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=WHOLE_GRAPH)
    return inner


class RootHook:
    """A hook that a copy of the model does not inherit, and that keeps no optimizer alive."""

    def __init__(self, capture: Any = None, method: str = "") -> None:
        self._capture = None if capture is None else weakref.ref(capture)
        self._method = method

    def __call__(self, *args: Any) -> Any:
        """Pass the call on, if anyone is there, and say whether the model is compiled: only tracing knows that."""
        return self._pass_on(torch.compiler.is_compiling(), *args)

    @outside_the_compiler
    def _pass_on(self, compiled: bool, *args: Any) -> Any:
        capture = None if self._capture is None else self._capture()
        return None if capture is None else getattr(capture, self._method)(compiled, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RootHook":
        return RootHook()

    def __reduce__(self) -> tuple[type["RootHook"], tuple[()]]:
        return RootHook, ()
