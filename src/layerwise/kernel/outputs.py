"""Which functions of the model's output a Jacobian or kernel is about."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, InteractionError, describe
from layerwise.foundations.likelihoods import Reading, Terms

Selection = str | int | Sequence[int] | Callable[[Tensor], Tensor]
"""``"all"``, ``"sum"``, an index (or several) into the last axis, or a function ``[N, *out] -> [N, *functions]``."""


@dataclass(frozen=True)
class Outputs(Reading):
    """P functions of each example, ``[N, 1, P]``, flattened in the order of the output's own axes."""

    select: Selection = "all"

    def __post_init__(self) -> None:
        if isinstance(self.select, str):
            known = self.select in ("all", "sum")
        elif isinstance(self.select, Sequence):
            known = all(_is_index(i) for i in self.select)
        else:
            known = _is_index(self.select) or callable(self.select)
        if not known:
            raise InputError(
                describe(
                    f"outputs={self.select!r}",
                    '"all", "sum", an index, a list of indices, or a function of the output',
                    "pass e.g. outputs=lambda f: f[:, 8] - f[:, 3]",
                )
            )

    def functions(self, f: Tensor, arrange: Callable[[Tensor], Tensor]) -> Float[Tensor, "N *functions"]:
        """The chosen functions, examples first."""
        by_example = arrange(f.unsqueeze(-1)).squeeze(-1)
        if isinstance(self.select, str):
            return by_example if self.select == "all" else by_example.reshape(by_example.shape[0], -1).sum(1)
        if callable(self.select):
            return _of_each_example(self.select(by_example), by_example.shape[0])
        return by_example[..., self._index(by_example)]

    def _index(self, by_example: Tensor) -> Any:
        chosen: list[int] = [self.select] if isinstance(self.select, int) else list(self.select)  # type: ignore[arg-type]
        size = by_example.shape[-1] if by_example.ndim > 1 else 0
        wrong = [i for i in chosen if not -size <= i < size]
        if wrong or not chosen:
            raise InputError(
                describe(
                    f"outputs={self.select!r} for a model with outputs of shape {tuple(by_example.shape[1:])}",
                    f"indices from {-size} to {size - 1} into the last axis",
                    'choose others, or outputs="all"',
                )
            )
        return self.select if isinstance(self.select, int) else chosen

    def standardize(self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor]) -> Terms:
        """The functions as outputs at one position; targets are not looked at."""
        read = self.alone(f, arrange)
        if torch.is_grad_enabled() and f.requires_grad and not read.requires_grad:
            raise InputError(
                describe(
                    "outputs= a function that returns something independent of the outputs",
                    "a differentiable function of them",
                    "return floating-point values computed from f",
                )
            )
        return Terms(read, None, read.new_ones(read.shape[:2]).detach(), None, ())

    def alone(self, f: Tensor, arrange: Callable[[Tensor], Tensor]) -> Float[Tensor, "N S C"]:
        """The same."""
        chosen = self.functions(f, arrange)
        return chosen.reshape(chosen.shape[0], 1, -1)

    def check(self, f: Tensor, arrange_some: Callable[[int], Callable[[Tensor], Tensor]], n: int) -> None:
        """A function of the outputs must treat every example alone."""
        if not callable(self.select) or n < 2:
            return
        by_example = arrange_some(n)(f.unsqueeze(-1)).squeeze(-1).detach()
        together = _of_each_example(self.select(by_example), n)
        slack = 1e-5 * float(together.abs().max()) if together.numel() else 0.0
        alone = [_of_each_example(self.select(by_example[i : i + 1]), 1)[0] for i in (0, n - 1)]
        same = (
            torch.allclose(together[i], one, rtol=1e-4, atol=slack) for i, one in zip((0, n - 1), alone, strict=True)
        )
        if not all(same):
            raise InteractionError(
                describe(
                    "outputs= a function that mixes examples (a row changes when its example is given alone)",
                    "a function of each example's own outputs",
                    "index and sum over axes 1, 2, … only",
                )
            )


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _of_each_example(chosen: Any, n: int) -> Tensor:
    if isinstance(chosen, Tensor) and chosen.ndim >= 1 and chosen.shape[0] == n and chosen.is_floating_point():
        return chosen
    given = f"{chosen.dtype}, shape {tuple(chosen.shape)}" if isinstance(chosen, Tensor) else type(chosen).__name__
    raise InputError(
        describe(
            f"outputs= a function that returns {given}",
            f"a floating-point tensor with the {n} examples first",
            "keep axis 0, e.g. outputs=lambda f: f[:, 8] - f[:, 3]",
        )
    )
