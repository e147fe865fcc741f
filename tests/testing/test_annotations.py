"""What the suite's own wrapper of annotations lets through, and what it does not."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jaxtyping
import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from torch import Tensor

import annotations
from layerwise.optim.cuda import elementwise

checked = annotations.jaxtyped(typechecker=beartype)


@checked
def product(A: Float[Tensor, "m n"], B: Float[Tensor, "n k"], scale: float = 1.0) -> Float[Tensor, "m k"]:
    return scale * A @ B


@checked
def transposed(A: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    """Not what it says, unless it is square."""
    return A.mT


@checked
def named(name: str, count: "int" = 1) -> list[str]:
    return [name] * count


@checked
def counted(n: int) -> Iterator[int]:
    yield from range(n)


def test_axes_are_compared_between_arguments_and_with_the_result():
    A, B = torch.ones(2, 3), torch.ones(3, 4)
    assert product(A, B, scale=2.0).shape == (2, 4)
    assert transposed(torch.ones(3, 3)).shape == (3, 3)
    for wrong in (lambda: product(A, A), lambda: product(A, B.long()), lambda: product(A, B, scale="2")):
        with pytest.raises(TypeCheckError):
            wrong()
    with pytest.raises(TypeCheckError, match="return"):
        transposed(A)
    assert transposed(torch.ones(5, 5)).shape == (5, 5)


def test_axes_of_one_call_are_not_those_of_the_next_or_of_one_within():
    @checked
    def twice(A: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        return product(product(A, torch.ones(A.shape[1], 7)), torch.ones(7, A.shape[1]))

    assert twice(torch.ones(2, 3)).shape == (2, 3)
    assert twice(torch.ones(4, 5)).shape == (4, 5)


def test_names_in_quotes_and_generators():
    assert named("a", 2) == ["a", "a"]
    assert list(counted(3)) == [0, 1, 2]
    for wrong in (lambda: named(1), lambda: named("a", "b"), lambda: counted("a")):
        with pytest.raises(TypeCheckError):
            wrong()


def made(add: int, otherwise: Any = None) -> Callable[..., Any]:
    @checked
    def inner(x: int) -> int:
        if x > 10:
            return inner(x - 10)
        return otherwise if x < 0 else x + add

    return inner


def test_functions_within_functions_are_checked_each_time_they_are_made():
    one, two = made(1), made(2, otherwise="text")
    assert (one(0), two(0), one(25)) == (1, 2, 6)
    for wrong in (lambda: one("0"), lambda: two(-1), lambda: one(-1)):
        with pytest.raises(TypeCheckError):
            wrong()
    assert (two(0), one(0)) == (2, 1)


def test_no_function_within_a_function_is_kept_alive():
    def make(kept: list[int]) -> Callable[..., Any]:
        @checked
        def inner(x: int) -> int:
            return x + len(kept)

        return inner

    one = make([])
    one(0)
    gone = weakref.ref(one)
    del one
    assert gone() is None


@checked
@dataclass
class Pair:
    first: int
    second: list[str] = field(default_factory=list)


def test_fields_of_dataclasses():
    assert Pair(1, ["a"]).second == ["a"]
    assert Pair(1).second == []
    for wrong in (lambda: Pair("1"), lambda: Pair(1, [2])):
        with pytest.raises(TypeCheckError):
            wrong()


def test_nothing_is_checked_where_checks_are_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    assert transposed(torch.ones(2, 3)).shape == (3, 2)
    assert made(1, otherwise="text")(-1) == "text"


def test_the_library_is_checked():
    assert jaxtyping.jaxtyped is annotations.jaxtyped
    with pytest.raises(TypeCheckError):
        elementwise.dot("X", torch.ones(3))
