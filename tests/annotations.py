"""Annotations checked at every call, as jaxtyping's import hook does it, in a fraction of its time.

The hook decorates every ``def`` with `jaxtyping.jaxtyped`, which is looked up here instead.

- Its wrapper binds a signature and has beartype check the arguments twice, some 30 µs a call. beartype itself, with
  jaxtyping's memory of axes around it, finds the same in some 3 µs.
- A function within a function is decorated anew whenever the outer one is called, which takes milliseconds: most of
  the time of a small model. Its wrapper is kept with its code, and takes the function itself from the call.
"""

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, ForwardRef, Literal, get_args, get_origin

import jaxtyping
from beartype.roar import BeartypeCallHintViolation

Decorator = Callable[[Any], Any]
standard = jaxtyping.jaxtyped


def install() -> None:
    """For all that is imported, and all that is called, from now on."""
    jaxtyping.jaxtyped = jaxtyped


def jaxtyped(*args: Any, **options: Any) -> Any:
    """jaxtyping's own, but for functions that the hook hands it."""
    if args or set(options) != {"typechecker"}:
        return standard(*args, **options)
    return lambda made: _decorated(made, options["typechecker"])


def _decorated(made: Any, typechecker: Decorator) -> Any:
    slowly = standard(typechecker=typechecker)
    if inspect.isclass(made):
        if dataclasses.is_dataclass(made) and not hasattr(made.__init__, "__wrapped__"):
            made.__init__ = _decorated(made.__init__, typechecker)
        return made
    if not isinstance(made, FunctionType) or hasattr(made, "__no_type_check__"):
        return slowly(made)
    if "<locals>" in made.__qualname__:  # defaults may differ from one to the next, and must not be kept alive
        return slowly(made) if made.__defaults__ or made.__kwdefaults__ else _within(made, slowly)
    # Names in quotes are resolved by jaxtyping; of a generator, beartype would check what it yields as well.
    if inspect.isgeneratorfunction(made) or any(_is_quoted(hint) for hint in made.__annotations__.values()):
        return slowly(made)
    return _outermost(made, typechecker)


def _is_quoted(hint: Any) -> bool:
    if isinstance(hint, str | ForwardRef):
        return True
    return get_origin(hint) is not Literal and any(_is_quoted(part) for part in _parts(hint))


def _parts(hint: Any) -> list[Any]:
    return [part for arg in get_args(hint) for part in (arg if isinstance(arg, list) else [arg])]


def _outermost(function: FunctionType, typechecker: Decorator) -> Callable[..., Any]:
    checked = typechecker(function)
    if checked is function:  # it has no annotations
        return function
    axes = standard("context")

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        with axes:
            try:
                return checked(*args, **kwargs)
            except BeartypeCallHintViolation as error:
                raise jaxtyping.TypeCheckError(str(error)) from error

    return wrapped


class _Calls(threading.local):
    """The functions that one wrapper is calling, innermost last."""

    def __init__(self) -> None:
        self.running: list[Callable[..., Any]] = []


_made: dict[Hashable, tuple[_Calls, Callable[..., Any]]] = {}


def _within(function: FunctionType, decorator: Decorator) -> Callable[..., Any]:
    if not function.__annotations__:
        return function
    key = (function.__code__, tuple(function.__annotations__.items()))
    try:
        known = _made.get(key)
    except TypeError:  # an annotation without a hash
        return decorator(function)
    calls, checked = known or _made.setdefault(key, _shared(function, decorator))

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        calls.running.append(function)
        try:
            return checked(*args, **kwargs)
        finally:
            calls.running.pop()

    return wrapped


def _shared(function: FunctionType, decorator: Decorator) -> tuple[_Calls, Callable[..., Any]]:
    """The wrapper of a function with the same name, place and annotations, which calls the one that is running."""
    calls = _Calls()

    def called(*args: Any, **kwargs: Any) -> Any:
        return calls.running[-1](*args, **kwargs)

    alike = FunctionType(called.__code__, function.__globals__, function.__name__, None, called.__closure__)
    alike.__qualname__, alike.__module__ = function.__qualname__, function.__module__
    alike.__annotations__ = dict(function.__annotations__)
    alike.__signature__ = inspect.signature(function)  # pyright: ignore
    return calls, decorator(alike)
