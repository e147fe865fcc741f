"""`OwnArithmetic`: algebra in the dtype of its tensors, whatever ``torch.autocast`` the caller is in.

Autocast is meant for the forward of a model. A solve inside it would be made of products in bfloat16, with 2 to 30 %
of error.
"""

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
Guard = Callable[[Callable[..., Any]], Callable[..., Any]]

OPERATIONS = ("__matmul__", "__add__", "__sub__", "__mul__", "__rmul__", "__truediv__", "__call__")
"""What counts as public beside names without an underscore."""
DEVICES = ("cpu", "cuda")


def without_autocast(fn: Callable[P, R]) -> Callable[P, R]:
    """A function that runs outside of autocast.

    >>> product = without_autocast(torch.mm)
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     product(torch.ones(1, 1), torch.ones(1, 1)).dtype
    torch.float32
    """

    @wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return fn(*args, **kwargs)

    return wrapped


class OwnArithmetic:
    """Every public method and operation of a subclass is guarded, its own and those of classes below it.

    `guard` is for classes that run a model, which must find the caller's autocast again; it is inherited.
    """

    _guard: ClassVar[Guard] = staticmethod(without_autocast)

    def __init_subclass__(cls, guard: Guard | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if guard is not None:
            cls._guard = staticmethod(guard)
        for name, member in list(vars(cls).items()):
            if isinstance(member, FunctionType) and (not name.startswith("_") or name in OPERATIONS):
                setattr(cls, name, _where_needed(member, cls._guard))


def _where_needed(fn: Callable[P, R], guard: Guard) -> Callable[P, R]:
    """The guard costs ten microseconds, and is left out where there is no autocast: methods call one another."""
    guarded = guard(fn)

    @wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        on = any(torch.is_autocast_enabled(device) for device in DEVICES)
        return (guarded if on else fn)(*args, **kwargs)

    return wrapped
