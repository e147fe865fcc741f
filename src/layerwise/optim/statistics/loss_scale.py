"""How the loss in the user's loop relates to a sum over examples, and how many terms it has."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from layerwise.foundations.errors import InputError, describe, not_one_of
from layerwise.foundations.likelihoods import Categorical, Likelihood


@dataclass(frozen=True)
class LossScale:
    """How the user's loss relates to a sum over examples, as far as the optimizer is told."""

    average: str | None = "auto"
    """ "auto": nothing is said. Updates of AdamW's size do not depend on it; formulas take a mean over examples."""
    accumulate: int | None = None
    scaler: Any = None
    """A `torch.amp.GradScaler`, whose scale the gradients carry until it unscales them."""

    def __post_init__(self) -> None:
        if self.average not in ("auto", "examples", "tokens", None):
            said = not_one_of("loss_average", self.average, ("auto", "examples", "tokens", None))
            raise InputError(f"{said} Say how the loss in your loop is reduced: None is for a sum.")
        if self.accumulate is not None and self.accumulate < 1:
            raise InputError(describe(f"accumulate={self.accumulate}", "a number ≥ 1", "pass the number of batches"))

    @property
    def given(self) -> bool:
        """Whether anything was said."""
        return bool(self.words())

    def words(self) -> list[str]:
        """What was said."""
        found = [] if self.average == "auto" else [f"loss_average={self.average!r}"]
        found += [] if self.accumulate is None else [f"accumulate={self.accumulate}"]
        return found + ([] if self.scaler is None else [f"grad_scaler={type(self.scaler).__name__}"])

    def to_sum(self, examples: int, tokens: int) -> float:
        """The factor from the gradient of the user's loss to that of the sum over examples."""
        terms = {"auto": examples, "examples": examples, "tokens": tokens, None: 1}[self.average]
        scale = float(self.scaler.get_scale()) if self.scaler is not None and self.scaler.is_enabled() else 1.0
        return terms * (self.accumulate or 1) / scale

    def possible(self, examples: int, tokens: Iterable[int]) -> set[float]:
        """What `to_sum` may be: where no reduction is given, that of any."""
        averages = ("examples", "tokens", None) if self.average == "auto" else (self.average,)
        return {replace(self, average=average).to_sum(examples, n) for average in averages for n in tokens}

    def to_mean_gradient(self, examples: int, tokens: int, ranks: int = 1) -> float:
        """The factor from accumulated gradients (unscaled) to the gradient of the mean over examples.

        Gradients are means over `ranks`, whose examples and tokens are counted together: all scale alike.
        """
        n = max(examples, 1)
        factors = {"examples": 1.0, "tokens": tokens / n, None: (self.accumulate or 1) * ranks / n}
        return factors["examples" if self.average == "auto" else self.average]


def class_axis(f: Tensor) -> int:
    """No target tells where the classes are: last for ``[N, T, C]``, second for ``[N, C, H, W]``, as torch has it."""
    return 1 if f.ndim > 3 else -1


def with_class_axis(likelihood: Likelihood, f: Tensor) -> Likelihood:
    """A likelihood that says where the classes are."""
    if f.ndim > 2 and isinstance(likelihood, Categorical) and likelihood.class_axis is None:
        return replace(likelihood, class_axis=class_axis(f))
    return likelihood


def tokens_of(f: Tensor, examples: int, likelihood: Likelihood | None) -> int:
    """Positions of the output: all but its class axis."""
    known = likelihood.class_axis if isinstance(likelihood, Categorical) else None
    axis = class_axis(f) if known is None else known
    return max(examples, f.numel() // f.shape[axis]) if f.ndim > 1 else examples
