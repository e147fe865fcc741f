"""Which matrix? One parameter may hold several: query, key and value in one weight, heads in each, experts in a stack.

    lw.optim.Muon(model, lr=1e-3, matrices={"*.qkv": lw.split(3, heads=12), "*.experts": lw.batched()})
    lw.fisher(model, data, matrices={"*.qkv": lw.split(3)})

Each matrix then has factors, an eigenbasis or an orthogonal update of its own: K groups of one form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe
from layerwise.layers.form import Form, LayerRule, Moment, Part
from layerwise.layers.io.one_hot import OneHot


@dataclass(frozen=True)
class Split:
    """Outputs cut into equal consecutive pieces, each a matrix with the same inputs."""

    parts: int
    heads: int = 1

    @property
    def count(self) -> int:
        """K."""
        return self.parts * self.heads


@dataclass(frozen=True)
class Batched:
    """A parameter ``[K, a, b]`` that is K matrices."""


Matrices = Mapping[str, Split | Batched]
"""By pattern of layer or parameter names; the first that fits counts."""


def split(parts: int, heads: int = 1) -> Split:
    """A weight whose outputs are `parts` matrices (query, key and value), each of `heads` (one a head).

    >>> split(3, heads=4).count
    12
    """
    for name, value in (("parts", parts), ("heads", heads)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(describe(f"{name}={value!r}", "a whole number ≥ 1", "pass e.g. lw.split(3, heads=12)"))
    return Split(parts, heads)


def batched() -> Batched:
    """A parameter ``[K, a, b]`` that is K matrices ``a × b``, such as the experts of a mixture.

    >>> batched()
    Batched()
    """
    return Batched()


def checked(matrices: Any) -> dict[str, Split | Batched]:
    """The option, or what is wrong with it."""
    if not isinstance(matrices, Mapping):
        raise InputError(describe(f"matrices={matrices!r}", "a mapping", 'pass e.g. {"*.qkv": lw.split(3)}'))
    for pattern, how in matrices.items():
        if not isinstance(how, Split | Batched):
            raise InputError(
                describe(
                    f"matrices={{{pattern!r}: {how!r}}}",
                    "lw.split(parts, heads) or lw.batched()",
                    'pass e.g. {"*.qkv": lw.split(3, heads=12)}',
                )
            )
    return dict(matrices)


def split_form(form: Form, how: Split, name: str) -> Form:
    """The same parameters as K matrices."""
    k = how.count
    if form.groups != 1 or form.one_hot or form.weight is None or form.outputs % k:
        raise InputError(
            describe(
                f"matrices: {name!r} cut into {k}, whose form is {form.groups} × {form.outputs} × {form.inputs}",
                "one matrix whose outputs are a multiple of that",
                "choose another number of parts and heads, or another layer",
            )
        )
    return replace(form, groups=k, outputs=form.outputs // k, cut=k > 1)


def matrix_form(part: Part) -> Form | None:
    """A parameter of two axes as a matrix, of three as a stack of them; None if it is neither."""
    shape = part.shape
    if len(shape) == 2 and min(shape) > 1:
        return Form(1, *shape, part, None)
    if len(shape) == 3 and min(shape) > 1:
        return Form(*shape, part, None)
    return None


@dataclass(frozen=True)
class SplitRule(LayerRule[nn.Module]):
    """Another rule's layer with its outputs cut into K pieces, which all have its inputs."""

    of: LayerRule = field()
    count: int = 1

    @property
    def own_forward(self) -> bool:  # type: ignore[override]
        """As the layer's own."""
        return self.of.own_forward

    @property
    def rounds_inputs(self) -> bool:  # type: ignore[override]
        """As the layer's own."""
        return self.of.rounds_inputs

    def forms(self, module: nn.Module, parts: dict[str, Part]) -> dict[str, Form]:
        """Those of the layer; they are cut by `split_form`."""
        return self.of.forms(module, parts)

    def lead(self, module: nn.Module, site: str, x: Tensor) -> int:
        """As the layer's own."""
        return self.of.lead(module, site, x)

    def inputs(self, module: nn.Module, site: str, x: Tensor) -> Tensor | OneHot:
        """``[*lead, S, K, I]``: the same for all K."""
        a = self.of.inputs(module, site, x)
        assert isinstance(a, Tensor)
        return a.expand(*a.shape[:-2], self.count, a.shape[-1])

    def outgrads(self, module: nn.Module, site: str, dy: Tensor) -> Tensor:
        """``[V, *lead, S, K, O]``."""
        return self.of.outgrads(module, site, dy).squeeze(-2).unflatten(-1, (self.count, -1))

    def copies_of_input(self, module: nn.Module) -> int | None:
        """The layer's own."""
        return self.of.copies_of_input(module)

    def input_moment(self, module: nn.Module, site: str, x: Tensor) -> Moment | None:
        """The layer's own, K times."""
        found = self.of.input_moment(module, site, x)
        if found is None:
            return None
        M, sums, rows = found
        return M.expand(self.count, -1, -1), sums.expand(self.count, -1), rows

    def channel_moment(self, module: nn.Module, site: str, x: Tensor) -> Moment | None:
        """The layer's own, K times."""
        found = self.of.channel_moment(module, site, x)
        if found is None:
            return None
        M, sums, rows = found
        return M.expand(self.count, -1, -1), sums.expand(self.count, -1), rows


def unused(matrices: Matrices, names: Sequence[str]) -> InputError:
    """A pattern that names nothing."""
    pattern = next(iter(matrices))
    return InputError(
        describe(
            f"matrices={{{pattern!r}: …}}, which matches no layer or parameter",
            f"a pattern of: {', '.join(names[:6])}, …",
            "see lw.layers(model)",
        )
    )
