"""`LayerTable`: which parameters get which form, decided once. ``print(table)`` is the first thing to look at."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from layerwise.foundations.errors import (
    InputError,
    NameLookupError,
    UnsupportedError,
    describe,
    not_one_of,
    unknown,
)
from layerwise.foundations.types import trainable, unwrap
from layerwise.layers.capture.uses import Used
from layerwise.layers.form import RULES, Form, LayerRule, Part, flat_form
from layerwise.layers.matrices import Batched, Matrices, SplitRule, checked, matrix_form, split_form, unused
from layerwise.layers.rules.products import StackedRule

STACKED = StackedRule()

OnUnsupported = Literal["elementwise", "skip", "raise"]
BESIDE = "the weight of its module is used elsewhere"
FALLBACK_BLOCK = 1024
"""A parameter without a rule keeps its exact block up to this many entries, its diagonal above."""


class TableChanged(Exception):
    """A later batch has shown that a layer falls back: what was added up of it so far is of no use."""


@dataclass(frozen=True)
class Site:
    """A place in the model where a form is used: a module, and which of its calls."""

    module_name: str
    module: nn.Module
    rule: LayerRule
    key: str
    used: Used | None = None
    """Set where products with a parameter are recorded, whoever makes them, and not calls of the module."""

    @property
    def own_forward(self) -> bool:
        """Whether the module's forward is that of the class the rule was written for, not of a subclass."""
        if self.used is not None:
            return True  # the product itself was seen
        return has_own_forward(self.module)

    def same_role(self, other: "Site") -> bool:
        """Whether two sites may share one form."""
        return type(self.rule) is type(other.rule)


def has_own_forward(module: nn.Module) -> bool:
    """Whether its forward is that of the class that a rule was written for, or at present the rule's own."""
    kind, of_instance = type(module), vars(module).get("forward")
    known = RULES.registered(kind)
    patched = of_instance is None or getattr(of_instance, "of_rule", False)
    return known is not None and kind.forward is known.forward and patched


@dataclass(frozen=True)
class LayerSpec:
    """One block of parameter space."""

    name: str
    form: Form
    kind: str
    """Name of the module's type."""
    sites: tuple[Site, ...] = ()
    reason: str | None = None
    """Why the block falls back; None if it has a rule."""

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters in this block."""
        return tuple(part.name for part in self.form.parts)

    def structure(self, asked: str = "kfac") -> str:
        """The structure this block gets where `asked` is requested."""
        if asked not in ("kfac", "ekfac"):
            return asked
        if not self.sites:
            return "block" if self.form.numel() <= FALLBACK_BLOCK else "diag"
        return asked if self.form.kronecker and self.form.weight is not None else "group"


@dataclass(frozen=True)
class LayerTable:
    """All blocks, and the parameters left out with the reason.

    >>> table = LayerTable.from_model(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    >>> [layer.name for layer in table.layers], table.layers[0].form.shape
    (['0'], (1, 2, 4))
    """

    layers: tuple[LayerSpec, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every parameter that takes part, in flat order."""
    untracked: Mapping[str, str] = field(default_factory=dict)
    matrices: Matrices = field(default_factory=dict)
    """Parameters that hold several matrices."""
    separate_bias: tuple[type[nn.Module], ...] = ()
    """Modules whose bias is a layer by itself."""

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        select: str | Iterable[str] = "*",
        on_unsupported: OnUnsupported = "elementwise",
        separate_bias: tuple[type[nn.Module], ...] = (),
        matrices: Matrices | None = None,
    ) -> "LayerTable":
        """Read a model: tied weights, frozen parameters and unknown modules included."""
        matrices = {} if matrices is None else checked(matrices)
        if on_unsupported not in ("elementwise", "skip", "raise"):
            raise InputError(not_one_of("on_unsupported", on_unsupported, ("elementwise", "skip", "raise")))
        model = unwrap(model)
        parameters = trainable(model)
        if not parameters:
            raise InputError(
                describe(
                    "a model without trainable parameters",
                    "at least one parameter with requires_grad",
                    "unfreeze some",
                )
            )
        _check_parameters(parameters)
        specs, reasons = _specs(model, parameters, separate_bias)
        covered = {name for spec in specs for name in spec.parameters}
        untracked = {}
        for name, parameter in parameters.items():
            if name in covered:
                continue
            reason = reasons.get(name, "no layer rule covers it")
            if on_unsupported == "raise":
                raise UnsupportedError(_unsupported_message(name, reason))
            if on_unsupported == "skip":
                untracked[name] = reason
                continue
            specs.append(fallback_spec(name, tuple(parameter.shape), reason))
        order = {name: index for index, name in enumerate(parameters)}
        specs.sort(key=lambda spec: min(order[p] for p in spec.parameters))
        shapes = {name: tuple(p.shape) for name, p in parameters.items() if name not in untracked}
        found = cls(tuple(_cut(spec, matrices) for spec in specs), shapes, untracked, matrices, separate_bias)
        for pattern in matrices:
            if not any(matches(spec, pattern) for spec in specs):
                raise unused({pattern: matrices[pattern]}, [*found.names(), *shapes])
        return found.selected(select)

    def selected(self, select: str | Iterable[str]) -> "LayerTable":
        """The blocks whose layer or parameter name matches a pattern (``*`` and ``?`` as in a shell)."""
        patterns = [select] if isinstance(select, str) else list(select)
        if patterns == ["*"]:
            return self
        if not patterns:
            raise InputError(describe("select=[]", "at least one pattern", 'pass e.g. select="*"'))
        kept, by_name = set[int](), self._by_name()
        for pattern in patterns:
            # A name without wildcards is looked up: a list of all layers' names is a common selection.
            plain = not any(sign in pattern for sign in "*?[")
            matching = by_name.get(pattern) if plain else [spec for spec in self.layers if matches(spec, pattern)]
            if not matching:
                raise NameLookupError(unknown("layer", pattern, self.names()))
            kept.update(id(spec) for spec in matching)
        layers = tuple(spec for spec in self.layers if id(spec) in kept)
        names = {name for spec in layers for name in spec.parameters}
        _require_whole(layers, names, self.shapes)
        return replace(self, layers=layers, shapes={k: v for k, v in self.shapes.items() if k in names})

    def _by_name(self) -> dict[str, list[LayerSpec]]:
        """The blocks that a name means: as a layer's, or as a parameter's."""
        found: dict[str, list[LayerSpec]] = {}
        for spec in self.layers:
            for name in {spec.name, *spec.parameters}:
                found.setdefault(name, []).append(spec)
        return found

    def names(self) -> list[str]:
        """Names of the blocks."""
        return [spec.name for spec in self.layers]

    def forms(self) -> dict[str, Form]:
        """Forms of the blocks, by name: sums of two batches are of one kind where these are equal."""
        return {spec.name: spec.form for spec in self.layers}

    def spec(self, name: str) -> LayerSpec:
        """The block of that name."""
        for candidate in self.layers:
            if candidate.name == name:
                return candidate
        raise NameLookupError(unknown("layer", name, self.names()))

    def numel(self) -> int:
        """Number of parameters that take part."""
        return sum(spec.form.numel() for spec in self.layers)

    def slices(self) -> dict[str, slice]:
        """Where each parameter lies in a flat vector."""
        where, start = {}, 0
        for name, shape in self.shapes.items():
            size = int(torch.Size(shape).numel())
            where[name] = slice(start, start + size)
            start += size
        return where

    def to_blocks(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``{layer: [*B, K, O, I]}`` from ``{parameter: [*B, *shape]}``."""
        return {spec.name: spec.form.join(params) for spec in self.layers}

    def to_params(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `to_blocks`."""
        pieces: dict[str, list[tuple[int, Tensor, Part]]] = {}
        for spec in self.layers:
            for part, tensor in spec.form.split(blocks[spec.name]):
                start = 0 if part.rows is None else part.rows[0]
                pieces.setdefault(part.name, []).append((start, tensor, part))
        return {name: _assemble(pieces[name]) for name in self.shapes}

    def with_uses(self, model: nn.Module, found: Sequence[Used]) -> "LayerTable":
        """The same table with layers that were found by use (see `capture.uses`) in place of what they replace."""
        if not found:
            return self
        found = [apart for used in found for apart in self._apart(model, used)]
        names = {part.name for used in found for part in used.form.parts}
        touched = [spec for spec in self.layers if names.intersection(spec.parameters)]
        rest = {name: BESIDE for spec in touched for name in spec.parameters if name not in names}
        kept = self.demote({spec.name: BESIDE for spec in touched}) if rest else self
        layers = [spec for spec in kept.layers if not names.intersection(spec.parameters)]
        layers += [
            _cut(_spec_by_use(model, used), self.matrices) for used in found if used.form.parts[0].name in self.shapes
        ]
        order = {name: index for index, name in enumerate(self.shapes)}
        layers.sort(key=lambda spec: min(order[p] for p in spec.parameters))
        return replace(self, layers=tuple(layers))

    def _apart(self, model: nn.Module, used: Used) -> list[Used]:
        form = used.form
        if len(form.parts) < 2 or not isinstance(_owner(model, used), self.separate_bias):
            return [used]
        return [Used(used.name, _weight_alone(form)), Used(f"{used.name}.bias", _bias_alone(form))]

    def with_matrices(self, model: nn.Module) -> "LayerTable":
        """The same table with parameters that fall back as matrices, for what needs nothing but the gradient.

        Tables of embeddings (tied to a head, say) stay as they are. Kernels of a depthwise convolution are one matrix,
        a row a channel: a single one is a vector.
        """
        looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
        others = {name for name, p in model.named_parameters() if id(p) not in looked_up}
        layers = []
        for spec in self.layers:
            bare = not spec.sites and len(spec.form.parts) == 1 and spec.parameters[0] in others
            form = matrix_form(spec.form.parts[0]) if bare else None
            layers.append(spec if form is None else _cut(replace(spec, form=form, reason=None), self.matrices))
        said = tuple(self.matrices)
        layers = [spec if any(matches(spec, pattern) for pattern in said) else _rows_together(spec) for spec in layers]
        return replace(self, layers=tuple(layers))

    def demote(self, reasons: Mapping[str, str]) -> "LayerTable":
        """The same table with the blocks of these names fallen back, each for the reason given.

        Parameters whose rows are shared by several blocks fall back together.
        """
        lost = {name: why for spec in self.layers if (why := reasons.get(spec.name)) for name in spec.parameters}
        layers: list[LayerSpec] = []
        for spec in self.layers:
            touched = [name for name in spec.parameters if name in lost]
            if not touched:
                layers.append(spec)
                continue
            for part in spec.form.parts:
                why = lost.get(part.name, reasons.get(spec.name) or lost[touched[0]])
                if part.name not in {layer.name for layer in layers}:
                    layers.append(fallback_spec(part.name, part.shape, why))
        return replace(self, layers=tuple(layers))

    def describe(self, structure: Any = "kfac") -> str:
        """One row a parameter tensor: layer, type, form, what it gets, and why if it falls back."""
        rows = [("parameter", "layer", "type", "K×O×I", str(structure), "reason")]
        for name in self.shapes:
            for spec in self.layers:
                if name in spec.parameters:
                    k, o, i = spec.form.shape
                    rows.append(
                        (
                            name,
                            spec.name,
                            spec.kind,
                            f"{k}×{o}×{i}",
                            spec.structure(structure),
                            spec.reason or "",
                        )
                    )
        rows += [(name, "-", "-", "-", "left out", reason) for name, reason in self.untracked.items()]
        widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "-" * min(sum(widths) + 2 * len(widths), 110))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.describe()

    def __iter__(self) -> Iterator[LayerSpec]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


def _check_parameters(parameters: Mapping[str, nn.Parameter]) -> None:
    """Real numbers that exist."""
    for name, p in parameters.items():
        if isinstance(p, nn.parameter.UninitializedParameter) or p.device.type == "meta":
            kind = "on the meta device" if p.device.type == "meta" else "not initialised yet (a lazy module)"
            raise InputError(
                describe(
                    f"parameter {name!r}, which is {kind} and has no values",
                    "a model with its weights",
                    "load or initialise them, and call a lazy model once",
                )
            )
        if not p.is_floating_point():
            raise UnsupportedError(
                describe(f"parameter {name!r} of dtype {p.dtype}", "real parameters", "freeze it, or split it in two")
            )


def fallback_spec(name: str, shape: tuple[int, ...], reason: str) -> LayerSpec:
    """The block of a parameter that no rule covers."""
    return LayerSpec(name, flat_form(Part(name, shape)), "Parameter", (), reason)


def matches(spec: LayerSpec, pattern: str) -> bool:
    """Whether a pattern names this block, or a parameter of it."""
    return any(fnmatchcase(name, pattern) for name in (spec.name, *spec.parameters))


def layers(
    model: nn.Module,
    select: str | Iterable[str] = "*",
    on_unsupported: OnUnsupported = "elementwise",
    matrices: Matrices | None = None,
) -> LayerTable:
    """Which layers of a model are seen, in which form, and what falls back and why.

    >>> print(layers(nn.Linear(2, 1)))
    parameter  layer   type    K×O×I  kfac  reason
    ------------------------------------------------
    weight     Linear  Linear  1×1×3  kfac
    bias       Linear  Linear  1×1×3  kfac

    Args:
        model: any module. A parameter whose module has no rule falls back (its exact block if small, else its
            diagonal) and the table says so.
        select: a pattern, or several, of layer or parameter names.
        on_unsupported: "elementwise" falls back, "skip" leaves the parameter out, "raise" is an error.
        matrices: parameters that hold several matrices, by pattern: ``{"*.qkv": lw.split(3, heads=12)}``.
    """
    return LayerTable.from_model(model, select, on_unsupported, matrices=matrices)


# --- building the table ----------------------------------------------------------------------------------


@dataclass
class _FormAtSite:
    """One form at one site, before ties are resolved."""

    site: Site
    form: Form

    @property
    def label(self) -> str:
        name = self.site.module_name or type(self.site.module).__name__
        return f"{name}.{self.site.key}" if self.site.key else name


def _specs(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], separate_bias: tuple[type[nn.Module], ...]
) -> tuple[list[LayerSpec], dict[str, str]]:
    uses, reasons = _uses(model, parameters)
    uses = _resolve_roles(uses, reasons)
    specs = []
    for group in _groups(uses):
        specs += _specs_of_group(group, separate_bias)
    return specs, reasons


def _cut(spec: LayerSpec, matrices: Matrices) -> LayerSpec:
    """A layer as the matrices that the user says it holds; one that falls back, or a bias apart, stays as it is."""
    how = next((how for pattern, how in matrices.items() if matches(spec, pattern)), None)
    if how is None or spec.reason is not None or spec.form.weight is None:
        return spec
    if isinstance(how, Batched):
        if spec.form.groups < 2:
            raise InputError(
                describe(
                    f"matrices={{…: lw.batched()}} for {spec.name!r} of shape {spec.form.parts[0].shape}",
                    "a parameter [K, a, b]",
                    "use lw.split(parts) for several matrices in one weight",
                )
            )
        return spec
    sites = tuple(replace(site, rule=SplitRule(site.rule, how.count)) for site in spec.sites)
    return replace(spec, form=split_form(spec.form, how, spec.name), sites=sites)


def _rows_together(spec: LayerSpec) -> LayerSpec:
    """K matrices of one row as one matrix of K rows; other layers as they are."""
    form = spec.form
    one_row = form.groups > 1 and form.outputs == 1 and form.inputs > 1 and form.kronecker
    if not one_row or form.weight is None or form.transposed or form.cut:
        return spec
    return replace(spec, form=replace(form, groups=1, outputs=form.groups))


def _owner(model: nn.Module, used: Used) -> nn.Module:
    return unwrap(model).get_submodule(used.form.parts[0].name.rpartition(".")[0])


def _spec_by_use(model: nn.Module, used: Used) -> LayerSpec:
    owner = _owner(model, used)
    rule = STACKED if used.stacked else RULES.find(nn.Linear)
    assert rule is not None
    return LayerSpec(used.name, used.form, type(owner).__name__, (Site(used.name, owner, rule, "", used),))


def _uses(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> tuple[list[_FormAtSite], dict[str, str]]:
    names = {id(p): name for name, p in parameters.items()}
    uses, reasons = [], {}
    for module_name, module in model.named_modules():
        own = {id(p): local for local, p in reversed(module._parameters.items()) if p is not None}  # its first name
        parts = {
            local: Part(names[id(p)], tuple(p.shape))
            for local, p in module._parameters.items()
            if p is not None and id(p) in names and own[id(p)] == local
        }
        if not parts:
            continue
        rule = RULES.find(type(module))
        why = f"{type(module).__name__} has no layer rule" if rule is None else rule.refuses(module)
        if why is None and rule is not None and rule.own_forward and not has_own_forward(module):
            why = f"{type(module).__name__} has a forward of its own, which the rule's would replace"
        if rule is None or why is not None:
            reasons |= {part.name: str(why) for part in parts.values()}
            continue
        for key, form in rule.forms(module, parts).items():
            uses.append(_FormAtSite(Site(module_name, module, rule, key), form))
    return uses, reasons


def _resolve_roles(uses: list[_FormAtSite], reasons: dict[str, str]) -> list[_FormAtSite]:
    """A parameter used in two different forms (embedding tied to the head) loses its form, not its peers'."""
    roles: dict[str, list[tuple[_FormAtSite, str]]] = {}
    for use in uses:
        for role, part in (("weight", use.form.weight), ("bias", use.form.bias)):
            if part is not None:
                roles.setdefault(part.name, []).append((use, role))
    for name, users in roles.items():
        (first, role), *others = users
        for other, other_role in others:
            packed = first.site.module is other.site.module and role == other_role
            if not packed and not _compatible(first, role, other, other_role):
                reasons[name] = f"tied in different roles: {first.label} and {other.label}"
    stripped = []
    for use in uses:
        form = use.form
        if form.weight is not None and form.weight.name in reasons:
            form = replace(form, weight=None, weight_inputs=0, transposed=False, one_hot=False, taps=1)
        if form.bias is not None and form.bias.name in reasons:
            form = replace(form, bias=None)
        if form.parts:
            stripped.append(_FormAtSite(use.site, form))
    return stripped


def _compatible(first: _FormAtSite, role: str, other: _FormAtSite, other_role: str) -> bool:
    if role != other_role or not first.site.same_role(other.site):
        return False
    a, b = first.form, other.form
    if role == "bias":
        return (a.groups, a.outputs) == (b.groups, b.outputs)
    return (a.groups, a.outputs, a.weight_inputs, a.transposed) == (
        b.groups,
        b.outputs,
        b.weight_inputs,
        b.transposed,
    )


def _groups(uses: list[_FormAtSite]) -> list[list[_FormAtSite]]:
    """Uses joined by a shared weight or bias."""
    groups: dict[int, list[_FormAtSite]] = {}
    group_of: dict[Part, int] = {}
    for number, use in enumerate(uses):
        touching = sorted({group_of[part] for part in use.form.parts if part in group_of})
        groups[number] = [u for other in touching for u in groups.pop(other)] + [use]
        for member in groups[number] if touching else (use,):
            for part in member.form.parts:
                group_of[part] = number
    return list(groups.values())


def _specs_of_group(group: list[_FormAtSite], separate_bias: tuple[type[nn.Module], ...]) -> list[LayerSpec]:
    first = group[0]
    kind = type(first.site.module).__name__
    joint = all(use.form == first.form for use in group)
    if joint and not (isinstance(first.site.module, separate_bias) and len(first.form.parts) == 2):
        return [LayerSpec(first.label, first.form, kind, tuple(use.site for use in group))]
    specs: list[LayerSpec] = []
    for role in ("weight", "bias"):
        by_part: dict[Part, list[_FormAtSite]] = {}
        for use in group:
            part = getattr(use.form, role)
            if part is not None:
                by_part.setdefault(part, []).append(use)
        for users in by_part.values():
            lead = users[0]
            form = _weight_alone(lead.form) if role == "weight" else _bias_alone(lead.form)
            name = lead.label if role == "weight" else f"{lead.label}.bias"
            specs.append(LayerSpec(name, form, kind, tuple(use.site for use in users)))
    return specs


def _weight_alone(form: Form) -> Form:
    return replace(form, bias=None)


def _bias_alone(form: Form) -> Form:
    return Form(form.groups, form.outputs, 0, None, form.bias, kronecker=False)


def _assemble(pieces: list[tuple[int, Tensor, Part]]) -> Tensor:
    if len(pieces) == 1:
        return pieces[0][1]
    pieces = sorted(pieces, key=lambda piece: piece[0])
    axis = pieces[0][1].ndim - len(pieces[0][2].shape)
    return torch.cat([tensor for _, tensor, _ in pieces], dim=axis)


def _require_whole(layers: tuple[LayerSpec, ...], names: set[str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Rows of a packed parameter are selected together or not at all."""
    covered = Counter[str]()
    for spec in layers:
        for part in spec.form.parts:
            covered[part.name] += part.numel()
    for name in names:
        if covered[name] != torch.Size(shapes[name]).numel():
            raise InputError(
                describe(
                    f"a selection with some rows of {name!r}",
                    "all projections packed in one parameter",
                    f"select the parameter: {name!r}",
                )
            )


def _unsupported_message(name: str, reason: str) -> str:
    return describe(
        f"parameter `{name}`: {reason}. Rules exist for {', '.join(RULES.names())}",
        'a rule for every parameter, as on_unsupported="raise" asks',
        "register one with `@layer_rule(MyLayer)`, or leave the option out to let it fall back",
    )
