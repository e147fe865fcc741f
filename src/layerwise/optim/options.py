"""Options of the optimizer: checked, and cut into parameter groups."""

import inspect
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe, not_one_of, unknown
from layerwise.foundations.likelihoods import Likelihood
from layerwise.foundations.vectors import trainable
from layerwise.layers.table import LayerSpec, LayerTable
from layerwise.optim.elementwise import AdamRule, GradientDescent
from layerwise.optim.parameters import BareParameters
from layerwise.optim.rule import UpdateRule
from layerwise.optim.solver import EARLIER, SOLVERS

GROUP_OPTIONS = ("lr", "weight_decay", "momentum", "nesterov", "damping", "factor_decay", "betas", "update")
"""What a parameter group may have of its own; the first two also a part of a layer."""
LIKELIHOOD: str | Likelihood | None = None
LOSS_AVERAGE: str | None = "auto"
"""What members take where nobody says otherwise."""
Overrides = Mapping[str, Mapping[str, Any]]
FALLBACKS: Mapping[str, Callable[[], UpdateRule]] = {"adam": AdamRule, "sgd": GradientDescent}
TORCHS_OWN = {
    "eps": "AdamW's ε is 1e-5 of the first gradients' root mean square, so that the loss's scale does not matter",
    "fused": "steps are fused wherever they can be",
    "foreach": "parameters of one shape are treated together anyway",
    "capturable": "steps are captured as CUDA graphs by cuda_graphs=",
    "amsgrad": "there is no such variant here",
    "maximize": "there is no such option here; negate the loss",
    "differentiable": "steps cannot be differentiated",
}
"""Options of torch's AdamW that a loop may bring along."""
BOUNDS = {"lr": math.inf, "momentum": 1.0, "weight_decay": math.inf, "damping": math.inf, "factor_decay": 1.0}
"""Numbers from 0 to below this."""


@dataclass(frozen=True)
class Statistics:
    """How second moments are taken; each field may also be given to an optimizer by itself.

    >>> import torch, layerwise as lw
    >>> opt = lw.optim.KFAC(torch.nn.Linear(4, 3), likelihood="categorical", statistics=lw.optim.Statistics(samples=2))
    """

    samples: int = 1
    """Labels drawn an example."""
    sharing: str = "expand"
    """ "expand" or "reduce", for weights shared over positions."""
    over: int | None = None
    """Steps over which a batch's statistics are taken in, at most `factor_every`: each layer's before its next
    decomposition, with the same result, so that no step is slow; rows are kept until then. 1: at once. None: on a GPU
    as many as there are between statistics, where labels are drawn or rows kept anyway; else 1. Where CUDA graphs of
    your own write over activations or gradients (`torch.cuda.make_graphed_callables`), 1. (`statistics_over`)"""
    example_axis: int | None = None
    """Axis of the examples in the input, where it is not the first."""
    tensor_parallel: str = "exact"
    """Of layers that ranks divide among them (`ColwiseParallel`, `RowwiseParallel`): "exact" gathers the divided side
    of a layer, inputs or output gradients, at steps that take statistics. "blocks" sends none of these: the factor of
    that side is block-diagonal, a block for each rank and one for the bias of the inputs."""

    def __post_init__(self) -> None:
        known("tensor_parallel", self.tensor_parallel, ("exact", "blocks"))
        positive("samples", self.samples)
        known("sharing", self.sharing, ("expand", "reduce"))
        if self.over is not None:
            positive("statistics_over", self.over)


@dataclass(frozen=True)
class Refresh:
    """How inverses, roots and bases are found; see `layerwise.optim.solver`."""

    solver: str = "auto"
    """ "auto", "eigh", "cholesky" or "products" (nothing waits for the device)."""

    def __post_init__(self) -> None:
        if self.solver in EARLIER:
            now = EARLIER[self.solver]
            warnings.warn(f"solver={self.solver!r} is called {now!r} now", DeprecationWarning, stacklevel=5)
            object.__setattr__(self, "solver", now)
        known("solver", self.solver, SOLVERS)


@dataclass(frozen=True)
class Execution:
    """How steps run on a GPU."""

    precision: str = "auto"
    """Of products: "high" (split fp16, 22 bits), "half" (fp16, 11 bits: a third of the work and half the state), or
    "auto": half where the first gradients are of half precision, as under autocast, and so carry 8 or 11 bits
    themselves; high elsewhere."""
    cuda_graphs: bool | None = None
    """Whether steps are captured as CUDA graphs and replayed; None: wherever they can be. What a step computes on its
    way then keeps its memory. See `layerwise.optim.cuda.captured_step`."""

    def __post_init__(self) -> None:
        known("precision", self.precision, ("auto", "high", "half"))
        switch("cuda_graphs", self.cuda_graphs)


GROUPS = {"statistics": Statistics, "refresh": Refresh, "execution": Execution}
ALONE = {
    "statistics_over" if each.name == "over" else each.name: (name, each.name)
    for name, kind in GROUPS.items()
    for each in fields(kind)
}
"""From the name of an option by itself to that of its group, and of its field there."""


def grouped(
    given: dict[str, Any], statistics: Statistics | None, refresh: Refresh | None, execution: Execution | None
) -> tuple[Statistics, Refresh, Execution]:
    """The three groups, with what was given by itself, which is taken out of `given`."""
    if "record" in given:
        warnings.warn("record= is called cuda_graphs= now", DeprecationWarning, stacklevel=4)
        given["cuda_graphs"] = given.pop("record")
    own: dict[str, dict[str, Any]] = {name: {} for name in GROUPS}
    for option in [option for option in given if option in ALONE]:
        name, field = ALONE[option]
        own[name][field] = given.pop(option)
    for name, group in (("statistics", statistics), ("refresh", refresh), ("execution", execution)):
        if group is not None and own[name]:
            field = next(iter(own[name]))
            raise InputError(describe(f"{field} beside {name}=", "one of them", f"put {field} into {name}="))
    alone = own["statistics"], own["refresh"], own["execution"]
    return statistics or Statistics(**alone[0]), refresh or Refresh(**alone[1]), execution or Execution(**alone[2])


def parameter_groups(
    model: nn.Module, table: LayerTable, overrides: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """One parameter group for every pattern of `overrides`, and one for the rest; or the groups that were given."""
    if isinstance(model, BareParameters) and (len(model.groups) > 1 or len(model.groups[0]) > 1):
        if overrides:
            raise InputError(describe("overrides beside parameter groups", "one of them", "put options in the groups"))
        for group in model.groups:
            check_numbers({**defaults, **group})
        return [with_own_rate(group) for group in model.groups]
    params, taken = dict(model.named_parameters()), set[str]()
    if not isinstance(model, BareParameters):  # parameters that are given take part when they are unfrozen, as in torch
        params = trainable(model)
    groups = []
    for pattern, options in overrides.items():
        _check_names(pattern, options, defaults)
        names = [name for name in _parameters_of(table, pattern) if name not in taken]
        if not names:
            raise InputError(
                describe(
                    f"overrides for {pattern!r}, which matches no layer",
                    f"a pattern of: {', '.join(table.names()[:6])}, …",
                    "see lw.layers(model)",
                )
            )
        check_numbers({**defaults, **options})
        taken.update(names)
        groups.append(with_own_rate({"params": [(name, params[name]) for name in names], **options}))
    rest = [(name, p) for name, p in params.items() if name not in taken]
    found = [*([{"params": rest}] if rest else []), *groups]
    _check_columns(table, {name: {**defaults, **group} for group in found for name, _ in group["params"]})
    return found


def group_defaults(rule: UpdateRule, given: Mapping[str, Any], fallback_lr: float | None) -> dict[str, Any]:
    """What a parameter group has, where it says nothing else."""
    defaults = {**given, "update": "rule"}
    if (average := rule.requirements().own_momentum) is not None:  # in the group, where schedulers change it
        own = (average, "nesterov") if average == "momentum" else ("betas",)
        defaults |= {name: defaults.get(name) or getattr(rule, name) for name in own}
    check_numbers(defaults)
    ratio, lr = 1.0, float(given["lr"])
    if fallback_lr is not None:
        check_number("fallback_lr", fallback_lr)
        if not lr:
            expected = "a learning rate above 0, to which fallback_lr keeps its proportion"
            raise InputError(describe("fallback_lr with lr=0", expected, 'use overrides={"*": {"lr": 0.0}} instead'))
        ratio = fallback_lr / lr  # which it keeps under schedules
    return {**defaults, "fallback_ratio": ratio}


def with_own_rate(group: dict[str, Any]) -> dict[str, Any]:
    """A group that says its learning rate means it, whatever `fallback_lr` is."""
    return {"fallback_ratio": 1.0, **group} if "lr" in group else group


def rate(group: Mapping[str, Any], fallback: bool) -> float:
    """A group's learning rate now: of the rule, or of the fallback, whose proportion to it stays under a schedule."""
    return float(group["lr"]) * (float(group.get("fallback_ratio", 1.0)) if fallback else 1.0)


def _check_columns(table: LayerTable, options: Mapping[str, Mapping[str, Any]]) -> None:
    """A bias that is a column of its layer's matrix may have its own rate and decay, and nothing else."""
    for spec in table.layers:
        first, *others = (options[name] for name in spec.parameters)
        shared = GROUP_OPTIONS[2:] if spec.form.kronecker else ("momentum", "nesterov")
        for other in others:
            differing = [name for name in shared if first.get(name) != other.get(name)]
            if differing:
                raise InputError(
                    describe(
                        f"overrides that give {differing[0]!r} to a part of layer {spec.name!r}",
                        f"one value for {' and '.join(spec.parameters)}, which are one matrix (lr and weight_decay may "
                        "differ)",
                        f"name the layer, {spec.name!r}, or pass separate_bias=True",
                    )
                )


def _check_names(pattern: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    if not isinstance(options, Mapping):
        expected = 'a dictionary, such as {"lr": 1e-3}'
        raise InputError(describe(f"overrides={{{pattern!r}: {options!r}}}", expected, "pass one"))
    allowed = [name for name in GROUP_OPTIONS if name in defaults]
    for name in options:
        if name not in allowed:
            said = unknown("option", name, allowed, where=f"in overrides[{pattern!r}]")
            raise InputError(f"{said} Other options hold for the whole optimizer.")


def _parameters_of(table: LayerTable, pattern: str) -> list[str]:
    """All parameters of layers that a pattern names, and those that it names themselves, without repeats."""

    def named(spec: LayerSpec) -> list[str]:
        if any(fnmatchcase(name, pattern) for name in (spec.name, spec.parameters[0].rpartition(".")[0])):
            return list(spec.parameters)
        return [name for name in spec.parameters if fnmatchcase(name, pattern)]

    return list(dict.fromkeys(name for spec in table.layers for name in named(spec)))


def show_options(member: Callable[..., Any], engine: Callable[..., Any], hidden: Collection[str]) -> None:
    """Show in a member's signature what its ``**options`` pass on, for `help`, notebooks and `inspect.signature`."""
    own = inspect.signature(member)
    shown = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    known = {*own.parameters, *hidden}
    if len(shown) < len(own.parameters):
        passed = inspect.signature(engine).parameters.values()
        shown += [p for p in passed if p.kind is p.KEYWORD_ONLY and p.name not in known]
        member.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]


def about_unknown(member: type, others: Collection[str]) -> str:
    """What to do about options that a member does not have: torch's own, or misspelt ones."""
    name, known = next(iter(others)), [*inspect.signature(member).parameters, *ALONE]
    if name in TORCHS_OWN:
        expected = f"options among: {', '.join(known)}"
        return describe(f"{member.__name__}({name}=…)", expected, f"leave {name} out: {TORCHS_OWN[name]}")
    return f"{unknown('option', name, known, where=f'of {member.__name__}')} See help(lw.optim.{member.__name__})."


def fallback_rule(given: str | UpdateRule, betas: tuple[float, float] | None = None) -> UpdateRule:
    """What parameters get that the rule does not treat; `betas` are those of "adam"."""
    if betas is not None:
        _check_betas(betas)
        if given == "adam":
            return AdamRule(betas)
    if isinstance(given, UpdateRule):
        return given
    if given not in FALLBACKS:
        raise InputError(not_one_of("update_fallback", given, (*FALLBACKS, "an UpdateRule")))
    return FALLBACKS[given]()


def by_scale(scale: str, given: Any, adam: Any, formula: Any) -> Any:
    """An option as it was given; else what goes with updates of AdamW's size, or with the bare formula."""
    if given is not None:
        return given
    return adam if scale == "adam" else formula


def clip_by_scale(scale: str, given: Any) -> Any:
    """A clip as it was given; "auto": none with updates of AdamW's size, 1e-3 with the bare formula."""
    return by_scale(scale, None, None, 1e-3) if given == "auto" else given


def statistics_options(scale: str, likelihood: str | Likelihood | None, options: dict[str, Any]) -> dict[str, Any]:
    """Of a member with output gradients: under AdamW's size the likelihood is recognised, unless something is said."""
    auto = scale == "adam" and likelihood is None and options.get("estimator") is None
    return {"likelihood": "auto" if auto else likelihood, **options}


def positive(name: str, value: int) -> int:
    """A number of steps."""
    if not isinstance(value, int | float) or value < 1:
        raise InputError(describe(f"{name}={value!r}", "a number of steps ≥ 1", "pass e.g. 10"))
    return int(value)


def known(name: str, value: str, names: tuple[str, ...]) -> str:
    """One of some names."""
    if value not in names:
        raise InputError(not_one_of(name, value, names))
    return value


def switch(name: str, value: bool | None) -> bool | None:
    """On, off, or None for the optimizer's own choice; a word such as "no" would count as on."""
    if value is not None and not isinstance(value, bool):
        raise InputError(describe(f"{name}={value!r}", "True, False or None", "choose one of them"))
    return value


def check_numbers(options: Mapping[str, Any]) -> None:
    """Learning rates, decays and the like within their bounds."""
    known("update", options["update"], ("rule", "fallback"))
    if not isinstance(options["nesterov"], bool):
        raise InputError(describe(f"nesterov={options['nesterov']!r}", "True or False", "choose one of them"))
    for name, below in BOUNDS.items():
        check_number(name, options[name], below)
    if "betas" in options:
        _check_betas(options["betas"])


def _check_betas(betas: tuple[float, float]) -> None:
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InputError(describe(f"betas={betas!r}", "two numbers", "pass e.g. betas=(0.9, 0.95)"))
    for beta in betas:
        check_number("betas", beta, 1.0)


def check_number(name: str, given: Any, below: float = math.inf) -> float:
    """A number from 0 to below a bound; a tensor of one number is one."""
    number = isinstance(given, int | float | Tensor) and not isinstance(given, bool)
    if not number or not 0 <= float(given) < below:
        limit = "≥ 0" if below == math.inf else f"from 0 to below {below:g}"
        shown = float(given) if number else repr(given)
        raise InputError(describe(f"{name}={shown}", f"a finite number {limit}", "choose another"))
    return float(given)
