"""`LayerRule`: one a layer type. It puts a layer in standard form and knows no loss, factor or optimizer.

    y[n, s, k] = W[k] a[n, s, k],   a : [N, S, K, I],   g : [V, N, S, K, O]

To support a layer of your own, write three short methods and register them; `layerwise.testing.check_layer_rule`
then tells whether they are right.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor, nn

from layerwise.foundations.registry import TypeRegistry
from layerwise.layers.form import Form, Part
from layerwise.layers.io.one_hot import OneHot

M = TypeVar("M", bound=nn.Module)
Moment = tuple[Tensor, Tensor, int]
"""``Σ aaᵀ`` [K, I, I], ``Σ a`` [K, I] and the number of rows, the bias column left out."""


class LayerRule(ABC, Generic[M]):
    """What the rest of the library needs to know of a layer type."""

    own_forward: ClassVar[bool] = False
    """The rule runs an equivalent forward while recording (attention), and records inside it."""
    rounds_inputs: ClassVar[bool] = False
    """Under autocast the layer's inputs of single precision are rounded to the half type of its outputs."""

    def refuses(self, module: M) -> str | None:
        """Why this module cannot be put in standard form, or None."""
        return None

    @abstractmethod
    def forms(self, module: M, parts: dict[str, Part]) -> dict[str, Form]:
        """One form for each call site (the site "" is the module's own call).

        `parts` holds the trainable parameters by their name inside the module; leave out what is not there.
        """

    @abstractmethod
    def lead(self, module: M, site: str, x: Tensor) -> int:
        """How many leading axes of the input are not the layer's own (batch, time, …)."""

    @abstractmethod
    def inputs(self, module: M, site: str, x: Tensor) -> Tensor | OneHot:
        """``[*lead, S, K, I]`` from the layer's input, the bias column left out."""

    @abstractmethod
    def outgrads(self, module: M, site: str, dy: Tensor) -> Tensor:
        """``[V, *lead, S, K, O]`` from gradients ``[V, *out]`` of the layer's output."""

    def input_moment(self, module: M, site: str, x: Tensor) -> Moment | None:
        """A faster route to ``Σ aaᵀ`` than through `inputs`; None where there is none."""
        return None

    def channel_moment(self, module: M, site: str, x: Tensor) -> Moment | None:
        """``Σ aaᵀ`` over input channels alone (SUA); None where the layer has no kernel."""
        return None

    def forward(self, module: M, record: Callable[[str, Tensor, Tensor], None], *args: Any, **kwargs: Any) -> Any:
        """The equivalent forward of a rule with `own_forward`; `record(site, input, output)` each linear call."""
        raise NotImplementedError(f"{type(self).__name__} has no forward of its own")


RULES: TypeRegistry[LayerRule] = TypeRegistry("layerwise.layers.rules")


def layer_rule(*types: type[nn.Module]) -> Callable[[type[LayerRule]], type[LayerRule]]:
    """Register a rule for module types and their subclasses.

    >>> @layer_rule(nn.Linear)                      # doctest: +SKIP
    ... class LinearRule(LayerRule[nn.Linear]): ...
    """

    def register(cls: type[LayerRule]) -> type[LayerRule]:
        rule = cls()
        for module_type in types:
            RULES.add(module_type, rule)
        return cls

    return register
