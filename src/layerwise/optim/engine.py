"""`Layerwise`: the one optimizer. Hooks, schedules, groups, state and health; a rule gives the direction.

    scale="formula"   W ← (1 − η·decay) W − η · momentum(clip(graft(P⁻ᵖ ∇L Q⁻ᑫ)))
    scale="adam"      W ← (1 − η·decay) W − η · clip(D · ‖AdamW's update‖/‖D‖),  D = P⁻ᵖ m Q⁻ᑫ, m the averaged gradient

See `step.update` for the order in which a step happens.
"""

import math
import warnings
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from layerwise.distributed.exchange import named_failure
from layerwise.distributed.layout import Layout, MeshAxis
from layerwise.distributed.processes import Processes
from layerwise.foundations import likelihoods
from layerwise.foundations.errors import InputError, LayerwiseError, UnsupportedError, describe
from layerwise.foundations.likelihoods import Likelihood
from layerwise.foundations.random import seed_of
from layerwise.foundations.sharded import (
    Swapped,
    all_agree,
    is_sharded,
    local,
    named_parameters,
    offloaded,
    successors,
    tensor_parallel,
    whole,
)
from layerwise.layers.matrices import Matrices
from layerwise.layers.table import LayerSpec, LayerTable
from layerwise.optim.backend import Backend
from layerwise.optim.checkpoint import Checkpointed, owners
from layerwise.optim.choice import beyond_tensor_parallelism, check_rule, fallen_matrices, rule_of, why_fallback
from layerwise.optim.options import (
    LIKELIHOOD,
    LOSS_AVERAGE,
    Execution,
    Overrides,
    Refresh,
    Statistics,
    about_unknown,
    check_number,
    check_numbers,
    fallback_rule,
    grouped,
    known,
    parameter_groups,
    positive,
    show_options,
)
from layerwise.optim.parameters import BareParameters, model_of
from layerwise.optim.reference import Reference
from layerwise.optim.report import (
    group_lines,
    headline,
    layer_row,
    measure,
    most_fall_back,
    none_came,
    of_group,
    table,
    unseen,
)
from layerwise.optim.rule import Context, Health, UpdateRule
from layerwise.optim.sharding.plan import Blocks, Bucket, Plan
from layerwise.optim.solver import check_solver
from layerwise.optim.statistics.accumulate import Accumulator, Moments, Sums
from layerwise.optim.statistics.hooks import Capture, Seen
from layerwise.optim.statistics.loss_scale import LossScale
from layerwise.optim.statistics.output import OutputReader
from layerwise.optim.step.clip import Clip
from layerwise.optim.step.damping import Damping
from layerwise.optim.step.graft import Graft
from layerwise.optim.step.refresh_schedule import freshness
from layerwise.optim.step.stack import Stack
from layerwise.optim.step.update import EagerExecutor, Executor, SolveTogether, UpdateSize, averages_before, unit_of

if TYPE_CHECKING:
    from layerwise.optim.sharding.one_rank import LocalParameters
    from layerwise.optim.sharding.sharding import Sharding

OWN_MOMENTUM = {"momentum", "nesterov", "betas"}
"""Options of the optimizer's own rule, which a fallback that averages by itself does not take."""

REQUIRES_GRAD = attrgetter("requires_grad")

LIKELY_PRECISION = "half"
"""What `precision="auto"` will be, where no gradient has been seen: most who train on a GPU do so under autocast."""
MOST = 0.5
"""Share of the matrix parameters above which falling back is said."""


class Layerwise(Checkpointed):
    """One optimizer for the whole family ``W ← W − η P⁻ᵖ ∇L Q⁻ᑫ``; the named members are choices of its arguments.

    >>> import torch, layerwise as lw
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> opt = lw.optim.Layerwise(model, left="identity", right="inputs", power=1.0, lr=0.1)
    >>> x, y = torch.randn(32, 4), torch.randint(3, (32,))
    >>> for _ in range(3):
    ...     opt.zero_grad()
    ...     loss = torch.nn.functional.cross_entropy(model(x), y)
    ...     loss.backward()
    ...     _ = opt.step()

    Args:
        model: the module that is trained, before it is wrapped or compiled; or, where no statistic but "gradient" is
            asked for, its parameters or parameter groups, as torch's optimizers take them.
        left: statistic of P: "outgrads", "gradient" or "identity".
        right: statistic of Q: "inputs", "gradient" or "identity".
        power: p and q, or one number for both.
        basis: "factors" (roots of P and Q), or "eigen" (their eigenbasis, with second moments of its own).
        rule: an `UpdateRule` of your own, instead of the four above.
        lr: learning rate η.
        momentum: of the direction, after preconditioning.
        nesterov: look ahead.
        weight_decay: decoupled: ``W ← (1 − η·decay) W``.
        damping: a number, a function of the step, or "adaptive" (Levenberg–Marquardt; needs ``step(closure)`` or
            `step_result`).
        damping_scale: "relative" to each factor's mean eigenvalue, or "absolute".
        damping_split: how absolute damping is divided between two factors: "trace", "equal" (or "exact", EKFAC).
        factor_every: steps between statistics.
        refresh_every: steps between decompositions; layers take turns, so that no step is slow.
        factor_decay: ρ of the statistics' running mean.
        estimator: "empirical" (the loss's own gradients), "sampled" or "exact" (labels of the model; need
            `likelihood`).
        likelihood: "categorical", "gaussian", "bernoulli", an object of `lw.likelihoods`, or "auto": categorical and
            Bernoulli outputs are recognised by the first backward; others have empirical statistics, with a warning.
        graft: None, "gradient" or "adam": whose norm each layer's direction takes.
        clip: None, a number κ (the step's predicted change ``η² ⟨D, ∇L⟩`` stays below it), or ("norm", c).
        scale: "formula": the update is as large as the formula says. "adam", the members' default: the gradient is
            averaged as AdamW does, then preconditioned, and the update has the norm of AdamW's: `lr` means what it
            means there, and the loss's own scale nothing. See `layerwise.optim.step.update`.
        betas: AdamW's, with ``scale="adam"``, of the size of updates and of parameters without a rule; the first is
            also the momentum, where the member has none of its own. By default `momentum` and 0.999.
        update_fallback: "adam", "sgd", or a rule, for parameters that the rule does not treat.
        fallback_lr: learning rate of those; by default `lr`.
        overrides: options for layers or parameters by pattern, ``{"head": {"lr": 1e-3}, "embed*": {"update":
            "fallback"}, "*.bias": {"weight_decay": 0.0}}``.
        loss_average: how the loss in your loop is reduced: over "examples", over "tokens", or None for a sum. "auto":
            with ``scale="adam"`` it is of no account, with "formula" a mean over examples. Where the gradient at the
            output says otherwise, an error.
        accumulate: k, where the loss is divided by k and gradients are accumulated over k batches; likewise.
        grad_scaler: the `torch.amp.GradScaler` of your loop; likewise.
        max_factor: a side longer than this has no factor.
        matrices: parameters that hold several matrices, each with factors or a direction of its own, by pattern:
            ``{"*.qkv": lw.split(3, heads=12)}``. For members of gradients alone (Muon, Shampoo, SOAP) every parameter
            of two axes is a matrix and every one of three a stack, but for tables of embeddings.
        seed: of sampled labels.
        statistics: a `Statistics` with what is seldom said of them: samples, sharing, over, example_axis.
        refresh: a `Refresh`: by which solver inverses, roots and bases are found.
        execution: an `Execution`: precision and CUDA graphs on a GPU.
        others: the fields of those three, each by itself: ``samples=2``, ``solver="eigh"``, ``cuda_graphs=True``.
    """

    fixed: ClassVar[tuple[str, ...]] = ()
    """Options that a member does not leave open."""

    def __init__(
        self,
        model: nn.Module | ParamsT,
        left: str = "outgrads",
        right: str = "inputs",
        power: float | tuple[float, float] = 1.0,
        basis: str = "factors",
        *,
        rule: UpdateRule | None = None,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        damping: float | str | Callable[[int], float] = 1e-3,
        damping_scale: str = "relative",
        damping_split: str | None = None,
        factor_every: int = 1,
        refresh_every: int = 1,
        factor_decay: float = 0.95,
        estimator: str | None = None,
        likelihood: str | Likelihood | None = LIKELIHOOD,
        graft: str | None = None,
        clip: float | tuple[str, float] | None = None,
        scale: str = "formula",
        betas: tuple[float, float] | None = None,
        update_fallback: str | UpdateRule = "adam",
        fallback_lr: float | None = None,
        overrides: Overrides | None = None,
        loss_average: str | None = LOSS_AVERAGE,
        accumulate: int | None = None,
        grad_scaler: Any = None,
        max_factor: int = 8192,
        separate_bias: bool | None = None,
        matrices: Matrices | None = None,
        seed: int | torch.Generator = 0,
        statistics: Statistics | None = None,
        refresh: Refresh | None = None,
        execution: Execution | None = None,
        **others: Any,
    ) -> None:
        self._how = grouped(others, statistics, refresh, execution)
        if others:
            raise TypeError(about_unknown(type(self), others))
        statistics, refresh, execution = self._how
        self.rule = rule or rule_of(left, right, power, basis, damping_split, max_factor)
        if rule is not None:
            check_rule(rule)
        self.requires = self.rule.requirements()
        self.model = model_of(model, self.rule, type(self).__name__)
        check_solver(refresh.solver, self.requires.powers)
        self.fallback = fallback_rule(update_fallback, betas)
        self._damping = Damping(damping, damping_scale)
        self._graft, self._clip, self._size = Graft(graft), Clip.read(clip), UpdateSize(scale, betas)
        self._size.check(self.rule, graft)
        if betas is not None and self.requires.own_momentum is None:
            momentum = betas[0]
        self._unit: float | None = None
        self.factor_every, self.refresh_every = (
            positive("factor_every", factor_every),
            positive("refresh_every", refresh_every),
        )
        self._health = Health()
        self._scale = LossScale(loss_average, accumulate, grad_scaler)
        self._settings = {
            "estimator": estimator,
            "likelihood": likelihood,
            "samples": statistics.samples,
            "recognised": None,
        }
        self.separate_bias = scale == "adam" if separate_bias is None else separate_bias
        self._matrices = matrices
        self.table = self._read_table()
        self._stacks: list[Stack] | None = None
        self._sharding: Sharding | None = None
        self._on_one_rank: LocalParameters | None = None
        self._divided: dict[str, Division] = {}
        self._precision: str | None = None
        self._loaded: dict[str, dict[str, Tensor]] = {}
        self._shared: frozenset[str] | None = None
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "damping": self._damping.initial,
            "factor_decay": factor_decay,
            "update": "rule",
        }
        if (average := self.requires.own_momentum) is not None:  # in the group, where schedulers change it
            own = (average, "nesterov") if average == "momentum" else ("betas",)
            defaults |= {name: defaults.get(name) or getattr(self.rule, name) for name in own}
        check_numbers(defaults)
        defaults["fallback_ratio"] = 1.0 if fallback_lr is None else _fallback_ratio(fallback_lr, float(lr))
        super().__init__(parameter_groups(self.model, self.table, overrides or {}, defaults), defaults)
        self.steps_taken = 0
        self._strangers: list[tuple[str, nn.Parameter]] | None = None
        self._unseen: set[str] | None = None
        self._said_fallen = self._said_none_came = False
        self._remember_model()
        self._owners = owners(self.model)
        self.processes = Processes()
        self._accumulator = self._make_accumulator()
        self._capture = self._make_capture(statistics.example_axis, seed_of(seed))
        self.param_groups[0]["engine"] = self._engine()
        self._rehearsed: str | None = None
        self._rehearse(LIKELY_PRECISION)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):
            show_options(cls.__init__, Layerwise.__init__, ("rule", *cls.fixed))

    @property
    def proportional(self) -> bool:
        """Whether updates are in proportion to the rate: those of the bare formula, which nothing clips or grafts."""
        bare = self._size.method == "formula" and self._clip.describe() is None
        return bare and self._graft.method is None

    # --- construction ------------------------------------------------------------------------------------

    def _read_table(self) -> LayerTable:
        if isinstance(self.model, BareParameters):
            return self.model.table()
        separate, requires = (nn.Module,) if self.separate_bias else (), self.requires
        found = LayerTable.from_model(self.model, separate_bias=separate, matrices=self._matrices)
        if requires.inputs or requires.outgrads:
            found = found.demote(beyond_tensor_parallelism(found, tensor_parallel(self.model)))
        only_gradients = requires.matrices_only and not (requires.inputs or requires.outgrads)
        return found.with_matrices(self.model) if only_gradients else found

    @property
    def host_may_sync(self) -> bool:
        """Whether the host may look at values of tensors. On a GPU it would wait for the whole backward."""
        return self.param_groups[0]["params"][0].device.type == "cpu"

    def _make_backend(self, device: torch.device, precision: str | None = None) -> Backend:
        """The reference on a CPU; that of `cuda` on a GPU, or where factors are to be refined by products."""
        _, refresh, execution = self._how
        if self.host_may_sync and device.type == "cpu" and refresh.solver != "products":
            return Reference(refresh.solver)
        from layerwise.optim.cuda.backend import CudaBackend  # the GPU's code is not read where there is none

        return CudaBackend(refresh.solver, precision or self._precision or execution.precision)

    def _choose_precision(self, params: Collection[nn.Parameter]) -> str | None:
        """Of products on a GPU, where nothing was asked for: by the first gradients."""
        if self.host_may_sync or self._how[2].precision != "auto":
            return None
        grads = [p.grad for p in params if p.grad is not None]
        if not grads:
            return None
        from layerwise.optim.cuda.precision import are_half

        return "half" if are_half(grads) else "high"

    def _make_accumulator(self) -> Accumulator:
        found, known = Accumulator(self.requires, self._how[0].sharing, self.processes), dict[str, Moments | None]()
        optimizer = weakref.ref(self)  # nothing that the model's hooks reach may keep it alive

        def moments(spec: LayerSpec) -> Moments | None:
            owner = optimizer()
            if owner is not None and spec.name not in known:
                known[spec.name] = owner._moments_of(spec)
            return known.get(spec.name)

        found.moments, found.ask_again = moments, known.clear
        if not self.host_may_sync:
            from layerwise.optim.cuda.rows import KeptRows

            found.rows = KeptRows(self.requires)
        return found

    def _moments_of(self, spec: LayerSpec) -> Moments | None:
        """Which second moments the rule wants of a layer; None where the layer gets the fallback's update."""
        group = next((g for g in self.param_groups if spec.parameters[0] in g.get("param_names", ())), None)
        if group is None or self.rule_for(spec, group) is not self.rule:
            return None
        wanted = self.rule.requirements(self._shape_of(self.rule, spec, group))
        return wanted.outgrads, wanted.inputs

    def _shape_of(self, rule: UpdateRule, spec: LayerSpec, group: Mapping[str, Any]) -> Any:
        """Of a layer alone."""
        name = spec.parameters[0]
        first = {name: group["params"][group["param_names"].index(name)]}
        return Stack(rule, (spec,), dict(group), first, self._make_backend(first[name].device)).shape

    def _make_capture(self, example_axis: int | None, seed: int) -> Capture | None:
        requires = self.requires
        estimator, likelihood = self._settings["estimator"], self._settings["likelihood"]
        auto = likelihood == "auto"
        if auto:  # a copy goes on with what was recognised
            likelihood = found if (found := self._settings["recognised"]) in ("categorical", "bernoulli") else None
        law = None if likelihood is None else likelihoods.resolve(likelihood)
        if not (requires.inputs or requires.outgrads):
            return None
        self._check_divisions()
        if not requires.outgrads:
            estimator = "empirical"
        estimator = estimator or ("empirical" if law is None else "sampled")
        known("estimator", estimator, ("empirical", "sampled", "exact"))
        if estimator in ("sampled", "exact") and law is None:
            raise InputError(
                describe(
                    f"estimator={estimator!r} without a likelihood",
                    'likelihood="categorical", "gaussian", "bernoulli" or an object of lw.likelihoods',
                    'pass it, or use estimator="empirical"',
                )
            )
        self._settings["estimator"] = estimator
        found = Capture(
            self.model, self.table, estimator, law, self._settings["samples"], seed, self._scale, example_axis
        )
        found.observe, found.observe_rows = self._accumulator.add, self._accumulator.add_rows
        weakref.finalize(self, found.remove).atexit = False
        optimizer = weakref.ref(self)

        def before_a_forward() -> None:
            owner = optimizer()
            if owner is not None and owner._model_changed():
                owner._check_divisions()
                owner.follow_model()
                owner._divide(owner._capture)

        found.before_a_forward = before_a_forward
        asks = auto and requires.outgrads and self._settings["recognised"] is None
        if asks or self._scale.given:
            found.reader = OutputReader(self._scale, asks)
        found.needs_examples = requires.examples and not requires.moments
        self._divide(found)
        found.scale_free = self._scale_free and requires.outgrads
        self._recognise(found, self._settings["recognised"])
        return found

    def _check_divisions(self) -> None:
        """Second moments are put together from ranks; a rule that solves for all examples would need them whole. And
        they are of activations, beside the parameters."""
        if away := offloaded(self.model):
            raise UnsupportedError(
                describe(
                    f"{type(self).__name__} of parameters that CPUOffloadPolicy keeps on the host ({away[0]!r} and "
                    f"{len(away) - 1} more)",
                    "parameters on the device of the activations, whose second moments are taken there",
                    "shard the model without offload_policy, or take a member of gradients (Shampoo, SOAP, Muon, Adam, "
                    "SGD), which steps on the host",
                )
            )
        self._divided = tensor_parallel(self.model)
        if self._divided and self.requires.examples and not self.requires.moments:
            first = next(iter(self._divided))
            raise UnsupportedError(
                describe(
                    f"{type(self).__name__} of a model with tensor parallelism ({first!r} and {len(self._divided) - 1} "
                    "more parameters)",
                    "examples of whole layers, which tensor parallelism divides among ranks",
                    "shard the model by fully_shard alone, or take another member: KFAC, EKFAC and FOOF gather what "
                    "they need, Shampoo, SOAP, Muon, Adam and SGD need gradients only",
                )
            )

    def _divide(self, capture: Capture | None) -> None:
        """Tell a capture which ranks have its batch, and what it sees of the layers that they divide."""
        if capture is not None:
            of_batch = next((division.ranks for division in self._divided.values()), None)
            capture.draws_as = None if of_batch is None else min(of_batch)
            # Squares of examples are of whole ones, in bases that need not be block-diagonal.
            capture.blocks = self._how[0].tensor_parallel == "blocks" and not self.requires.examples

    def _blocks(self) -> dict[str, Blocks]:
        """Of layers that ranks divide, where the blocks of A and of G are, if they are to have any."""
        found: dict[str, Blocks] = {}
        if self._capture is None or self._how[0].tensor_parallel == "exact":
            return found
        for spec in self.table.layers:
            weight, form = spec.form.weight, spec.form
            division = None if weight is None else self._divided.get(weight.name)
            if division is not None and division.axis == 0:
                found[spec.name] = None, division.bounds(form.outputs)
            elif division is not None and division.axis == 1:
                bias = [(form.weight_inputs, form.inputs)] if form.bias is not None else []
                found[spec.name] = [*division.bounds(form.weight_inputs), *bias], None
        return found

    @property
    def _scale_free(self) -> bool:
        """Whether steps do not depend on the loss's scale."""
        return self._size.method == "adam" and not self.requires.loss_scale

    def _recognise(self, capture: Capture, name: str | None) -> None:
        """Take up the likelihood that was recognised."""
        if name in ("categorical", "bernoulli"):
            capture.likelihood, capture.estimator = likelihoods.resolve(name), "sampled"
            self._settings["estimator"] = "sampled"
        self._settings["recognised"] = name

    def _read_output(self, counts: Seen, seen: dict[str, Sums]) -> None:
        """What the backwards since the last step told of the loss; its scale is taken out of their statistics."""
        capture = self._capture
        assert capture is not None
        reader, empirical, factor = capture.reader, capture.estimator == "empirical", None
        if empirical and self._settings["recognised"] in ("categorical", "bernoulli"):  # labels could not be drawn
            self._settings |= {"recognised": "empirical", "estimator": "empirical"}
        if reader is not None:
            reader.check()
            if reader.asks and self._settings["recognised"] is None:
                votes = reader.votes().to(self.param_groups[0]["params"][0].device)
                self._recognise(capture, reader.decision(self.processes.add_up([votes])[0], type(self).__name__))
                factor = None if reader.seen is None else reader.seen.scale
        if not (seen and empirical and capture.scale_free):
            return
        if factor is None:
            energy = torch.zeros(()) if counts.energy is None else counts.energy
            known = torch.stack([energy, torch.full_like(energy, counts.tokens)]).double()
            energy, tokens = self.processes.add_up([known])[0]
            if not self.host_may_sync and not self.requires.examples:
                squared = tokens.clamp(min=1) / energy
                squared = torch.where((squared > 0) & (squared < math.inf), squared, 1.0)
                for sums in seen.values():
                    sums.rescale_by(squared)
                return
            factor = (float(energy) / max(float(tokens), 1)) ** 0.5
        if 0 < factor < math.inf:
            for sums in seen.values():
                sums.rescale(1 / factor)

    # --- stacks ------------------------------------------------------------------------------------------

    def _build(self) -> list[Stack]:
        """Layers of one shape, group and rule together; after the model was examined, if it is."""
        if self._capture is not None:
            self.table = self._capture.table
        group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        params = named_parameters(self.model)
        buckets = self._buckets(params, group_of)
        sharding = self._sharding = self._make_sharding(params, buckets, group_of)
        held = params if self._on_one_rank is None else self._on_one_rank.params
        if self._precision is None and sharding is None:  # ranks with shards would have to agree: they have "high"
            own = [spec for bucket in buckets if bucket.rule is self.rule for spec in bucket.specs]
            self._precision = self._choose_precision([held[name] for spec in own for name in spec.parameters])
        self._rehearse(self._precision or LIKELY_PRECISION)
        loaded = self._loaded
        if sharding is not None:
            from layerwise.optim.sharding.state import StateExchange

            loaded = StateExchange(sharding).loaded(loaded)
        elif any(is_sharded(t) for state in loaded.values() for t in state.values()):
            loaded = {layer: {k: whole(t) for k, t in state.items()} for layer, state in loaded.items()}
        stacks = []
        for bucket in buckets:
            names = [name for spec in bucket.specs for name in spec.parameters]
            all_here = [(bucket.specs, {k: held[k] for k in names}, bucket.group)]
            for specs, own, group in all_here if sharding is None else sharding.place(bucket):
                backend = self._make_backend(next(iter(own.values())).device)
                stack = Stack(bucket.rule, specs, group, own, backend, fallback=bucket.fallback)
                others = {k: group_of.get(id(params[k]), group) for k in own}
                stack.own_groups = {k: other for k, other in others.items() if other is not group}
                stack.ensure_state(loaded, None if stack.fallback else self._shared)
                stacks.append(stack)
        self._executor = self._make_executor(stacks)
        self._executor.resume(loaded)
        return stacks

    def _initial_state(self) -> dict[str, dict[str, Tensor]]:
        """That of stacks which are made to look at, and which a step would make alike."""
        stacks = self._build()
        for stack in stacks:
            shape, matrices = stack.shape, stack.requires.matrices_only
            moments = {name: shape.zeros(shape.outputs, shape.inputs) for name in ("graft_m", "graft_v", "momentum")}
            if self._size.sets(stack) or (matrices and self._graft.method == "adam"):
                stack.state |= {"graft_m": moments["graft_m"], "graft_v": moments["graft_v"]}
                stack.state["graft_steps"] = shape.zeros()
            if self._executor.momentum_of(stack):
                stack.state["momentum"] = moments["momentum"]
            if stack.requires.refreshes:
                freshness(stack)
        return self._saved_stacks(stacks)

    def _buckets(self, params: Mapping[str, nn.Parameter], group_of: Mapping[int, dict[str, Any]]) -> list[Bucket]:
        """What goes into one stack."""
        found: dict[Any, list[LayerSpec]] = {}
        for spec in self.table.layers:
            group = group_of.get(id(params[spec.parameters[0]]))
            if group is None:
                continue
            rule = self.rule_for(spec, group)
            form, first = spec.form, params[spec.parameters[0]]
            by_channel = rule is self.rule and self.requires.by_channel
            size = (form.outputs, form.inputs, form.one_hot, form.taps if by_channel else 1)
            groups = tuple(id(group_of.get(id(params[name]))) for name in spec.parameters)
            key = (id(rule), groups, *size, first.dtype, first.device)
            found.setdefault(key, []).append(spec)
        buckets = []
        for specs in found.values():
            first = params[specs[0].parameters[0]]
            group = group_of[id(first)]
            rule = self.rule_for(specs[0], group)
            sized = self._size.method == "adam" and rule.requirements().matrices_only
            fallback = rule is self.fallback and rule is not self.rule
            own = rule.requirements().own_momentum
            momentum = bool(group["momentum"]) and not averages_before(own, sized, rule is self.rule)
            buckets.append(Bucket(rule, group, tuple(specs), fallback, first.dtype, sized, momentum))
        return buckets

    def plan_for(self, ranks: int, copies: int = 1) -> Plan:
        """The plan of this model sharded by `fully_shard` over so many ranks, `copies` times (HSDP), without any.

        >>> import torch, layerwise as lw
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
        >>> plan = lw.optim.Shampoo(model).plan_for(2)
        >>> [(duty.layer, duty.owner) for duty in plan.duties], plan.gradient_bytes(0)
        ([('0', 0), ('2', 1)], 1280)
        """
        group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        params = {name: p for name, p in named_parameters(self.model).items() if id(p) in group_of}
        axes = (MeshAxis(copies), MeshAxis(ranks // copies, 0))
        by_shape = {shape: Layout.cut(shape, axes) for shape in {tuple(p.shape) for p in params.values()}}
        layouts = {name: by_shape[tuple(p.shape)] for name, p in params.items()}
        treated = [spec for spec in self.table.layers if self._accumulator.moments(spec)]
        shapes = {spec.name: self._accumulator.moment_shapes(spec) for spec in treated}
        return Plan.make(self._buckets(params, group_of), layouts, ranks, self.refresh_every, shapes, params)

    def _make_sharding(
        self, params: Mapping[str, nn.Parameter], buckets: list[Bucket], group_of: Mapping[int, dict[str, Any]]
    ) -> "Sharding | None":
        """Who owns what, where parameters are sharded over several processes; one alone has them whole."""
        own = {name: p for name, p in params.items() if id(p) in group_of}
        self._on_one_rank = None
        if not any(map(is_sharded, own.values())):
            return None
        from layerwise.optim.sharding.one_rank import LocalParameters
        from layerwise.optim.sharding.sharding import Sharding, sharding_group

        self.processes.group = sharding_group(own)
        if self.processes.count == 1:
            self._on_one_rank = LocalParameters(params)
            return None
        every = self.refresh_every
        blocks, layers = self._blocks(), self.table.layers
        return Sharding(own, buckets, group_of, self.processes, every, self._accumulator, layers, blocks)

    def _make_executor(self, stacks: list[Stack]) -> Executor:
        """Eager on a CPU; on a GPU one that never waits for the device."""
        how = (stacks, self.rule, self._health, self._damping, self._clip, self._graft, self._size, self._accumulator)
        if self._sharding is not None:
            from layerwise.optim.sharding.executor import ShardedExecutor

            return ShardedExecutor(*how, self.refresh_every, sharding=self._sharding)
        if self.host_may_sync:
            return EagerExecutor(*how, self.refresh_every)
        from layerwise.optim.cuda.executor import AsynchronousExecutor

        return AsynchronousExecutor(
            *how,
            self.refresh_every,
            factor_every=self.factor_every,
            statistics_over=self._how[0].over,
            draws_labels=self.requires.outgrads and self._settings["estimator"] != "empirical",
            cuda_graphs=self._how[2].cuda_graphs,
        )

    def _rehearse(self, likely: str) -> None:
        """On a GPU, begin to compile the kernels of a step in the background: at construction, and at the first step if
        gradients ask for another precision than is likely."""
        asked, first = self._how[2].precision, self.param_groups[0]["params"][0]
        precision = likely if asked == "auto" else asked
        if first.device.type != "cuda" or is_sharded(first) or self._rehearsed == precision or self._damping.adaptive:
            return
        from layerwise.optim.cuda.rehearsal import rehearse

        self._rehearsed = precision
        rehearse(lambda: self._stand_in(precision), lambda stack: self._context(stack, 1), first.device)

    def _stand_in(self, precision: str) -> Any:
        """An executor of the same stacks without data."""
        from layerwise.optim.cuda.rehearsal import kind_of, stand_ins

        group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        params, stacks = named_parameters(self.model), dict[Hashable, Stack]()
        for bucket in self._buckets(params, group_of):
            own = {name: params[name] for spec in bucket.specs for name in spec.parameters}
            backend = self._make_backend(next(iter(own.values())).device, precision)
            stack = Stack(bucket.rule, bucket.specs, bucket.group, stand_ins(own), backend, fallback=bucket.fallback)
            if kind_of(stack) not in stacks:
                stack.ensure_state({})
                stacks[kind_of(stack)] = stack
        return self._make_executor([*stacks.values()])

    def rule_for(self, spec: LayerSpec, group: Mapping[str, Any]) -> UpdateRule:
        """The rule that a layer gets: the optimizer's own, or the fallback's."""
        return self.fallback if self._reason(spec, group) else self.rule

    def _reason(self, spec: LayerSpec, group: Mapping[str, Any]) -> str | None:
        embeddings = self._size.method == "formula"
        return why_fallback(self.rule, self.requires, spec, group, embeddings, self._shape_of)

    # --- the step ----------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; `closure`, if given, computes the loss and its gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._damping.adaptive:
            self._damping.before(None if loss is None else _number(loss))
        self._step()
        if closure is not None and self._damping.wants_result(self.steps_taken):
            self._measure_again(closure)
        return loss

    def _measure_again(self, closure: Callable[[], Any]) -> None:
        """The loss after the step, on the same batch, for adaptive damping; gradients are put back."""
        grads = {p: None if p.grad is None else p.grad.clone() for group in self.param_groups for p in group["params"]}
        due = None if self._capture is None else self._capture.due
        if self._capture is not None:
            self._capture.due = False
        with torch.enable_grad():
            after = closure()
        for p, grad in grads.items():
            p.grad = grad
        if self._capture is not None:
            self._capture.collect()
            self._capture.due = bool(due)
        self.step_result(_number(after))

    def step_result(self, loss: float, before: float | None = None) -> None:
        """Tell adaptive damping the loss after the last step (and before it, unless ``step(closure)`` knew).

        With several processes a collective: each tells of its own batch, and all go by the mean.
        """
        ratio = self._damping.after(float(loss), before, self._mean_over_ranks)
        for group in self.param_groups:  # each group keeps its own proportion
            group["damping"] *= ratio

    def _mean_over_ranks(self, values: list[float]) -> list[float]:
        """Of numbers that every rank has of its own batch, from which all are to decide alike."""
        count = self.processes.count
        if count == 1:
            return values
        device = local(self.param_groups[0]["params"][0]).device
        with named_failure("losses for adaptive damping"):
            total = self.processes.add_up([torch.tensor(values, dtype=torch.float64, device=device)])[0]
        return (total / count).tolist()

    @torch.no_grad()
    def _step(self) -> None:
        """Everything but the loss. Not under the user's autocast or inference mode: steps have arithmetic of their
        own."""
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") or torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.no_grad():
                if torch.is_autocast_enabled("cuda"):
                    with torch.autocast("cuda", enabled=False):
                        self._step()
                else:
                    self._step()
            return
        self._require_known()
        if self._is_idle():
            return
        capture, counts, seen = self._capture, None, dict[str, Sums]()
        if capture is not None:
            counts = capture.collect()
        if self._stacks is None and self._is_sharded() and not self._begin(counts):
            return  # who owns a layer's statistics must be known before they are sent
        accumulator, counted = self._accumulator, (0, 0) if counts is None else (counts.examples, counts.tokens)
        if self._sharding is not None:
            seen = self._sharding.take_census(accumulator.take(), counted)
            counted = self._sharding.census.counted
        elif capture is not None and self.processes.count > 1:
            device = self.param_groups[0]["params"][0].device
            seen = accumulator.take_all(capture.table.layers, device, counted)
            counted = accumulator.counted
        elif capture is not None:
            seen = accumulator.take()
        if capture is not None and counts is not None and capture.reads_output:
            self._read_output(counts, seen)
        if self._unit is None and self._size.method == "adam":
            params = (p for group in self.param_groups for p in group["params"])
            self._unit = unit_of(params) if self._sharding is None else self._sharding.unit()
        if self._sharding is not None:
            seen = self._sharding.send_statistics(seen)
        if self._stacks is None and not self._begin(counts):
            return
        if capture is not None and capture.due and counts is not None and counts.examples:
            self._warn_unseen(seen, counts)
        self.steps_taken += 1
        self._health.steps += 1
        if self._damping.adaptive:
            self._damping.check(self.steps_taken)
        scale, examples = 1.0, 1
        if counted[0]:
            if not (capture is not None and capture.scale_free) and not self._scale_free:
                scale = self._scale.to_mean_gradient(*counted, self.processes.count)
            of_batch = next((len(division.ranks) for division in self._divided.values()), 1)
            examples = counted[0] // of_batch
        contexts = [self._context(stack, examples) for stack in self._stacks or []]
        if self._on_one_rank is not None:
            self._on_one_rank.begin()
        self._executor.run(contexts, seen, scale, self._solve_together)
        if self._on_one_rank is not None:
            self._on_one_rank.end()
        if capture is not None:
            capture.due = self.steps_taken % self.factor_every == 0

    def _is_sharded(self) -> bool:
        return any(is_sharded(p) for group in self.param_groups for p in group["params"])

    def _is_idle(self) -> bool:
        """Whether gradients are all zero and so are learning rates: frameworks take such a step to make states exist,
        which moves no average and counts for nothing."""
        if any(float(group["lr"]) for group in self.param_groups):
            return False
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        moves = torch.tensor(float(any(bool(local(grad).any()) for grad in grads)))
        return not float(self.processes.add_up([moves.to(grads[0].device)])[0] if grads else moves)

    def _begin(self, counts: Seen | None) -> bool:
        """The first step builds the stacks; returns whether it can be taken."""
        unknown = self._capture is not None and self._capture.notes is None
        if unknown and not all_agree(self.model, not self._broken()):
            self._health.steps, self._health.skipped_steps = self._health.steps + 1, self._health.skipped_steps + 1
            return False
        self._require_forward()
        self._stacks = self._build()
        self._unseen = None
        self._say_fallen()
        return True

    def _warn_unseen(self, seen: Collection[str], counts: Seen) -> None:
        """Warn, once each, of layers that have a gradient and never had statistics, which get the plain gradient's
        step; and of a backward that reached the output and brought no layer's statistics, after others did."""
        if self._unseen is not None and not self._unseen and (counts.layers or self._said_none_came):
            return
        own = [
            (spec, on)
            for stack in self._stacks or []
            if stack.rule is self.rule
            for spec, on in zip(stack.specs, stack.active(), strict=True)
        ]
        if self._unseen is None:
            self._unseen = {spec.name for spec, _ in own}
        self._unseen -= {*seen}
        missing = [spec.name for spec, on in own if on and spec.name in self._unseen]
        if missing:
            self._unseen -= {*missing}
            self._said_none_came = True
            warnings.warn(unseen(missing, len(own)), UserWarning, stacklevel=3)
        if any(on for _, on in own) and not counts.layers and not self._said_none_came:
            self._said_none_came = True
            warnings.warn(none_came(type(self).__name__, self.steps_taken + 1), UserWarning, stacklevel=3)

    def _say_fallen(self) -> None:
        """Warn, once, where most matrix parameters get the fallback's update and nobody asked for that."""
        if self._said_fallen or not self.requires.matrices_only:
            return
        layers = [(spec, stack.group) for stack in self._stacks or [] for spec in stack.specs]
        fallen = fallen_matrices([(spec, self._reason(spec, group)) for spec, group in layers], self.model)
        if fallen.share > MOST:
            self._said_fallen = True
            by_gradient = not (self.requires.inputs or self.requires.outgrads)
            said = most_fall_back(type(self).__name__, fallen, self.fallback.name, by_gradient)
            warnings.warn(said, UserWarning, stacklevel=2)

    _solve_together: SolveTogether | None = None
    """For members that look at all layers at once."""

    def _broken(self) -> bool:
        """Whether a gradient is not finite."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return any(not bool(torch.isfinite(local(grad)).all()) for grad in grads)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, and statistics of a step that was never taken (a gradient scaler leaves steps out)."""
        super().zero_grad(set_to_none)
        self._accumulator.take()
        if self._capture is not None:
            self._capture.forget()
            if self._capture.reader is not None:
                self._capture.reader.forget()

    def _require_known(self) -> None:
        """A parameter with a gradient that no group holds would silently stay as it is."""
        if self._model_changed():
            self.follow_model()
        if self._strangers is None:
            known = {id(p) for group in self.param_groups for p in group["params"]}
            self._strangers = [(name, p) for name, p in named_parameters(self.model).items() if id(p) not in known]
        for name, p in self._strangers:
            if p.requires_grad and p.grad is not None:
                raise LayerwiseError(
                    describe(
                        f"parameter {name!r} with a gradient, frozen or absent when the optimizer was built",
                        "parameters that the optimizer was told of",
                        f'call opt.add_param_group({{"params": [model.get_parameter({name!r})]}}), or '
                        f"model.get_parameter({name!r}).requires_grad_(False)",
                    )
                )

    def _remember_model(self) -> None:
        """The model's modules and parameters by identity, and which parameters are trained."""
        modules, instead = [*self.model.modules()], successors(self.model)
        self._children = [held for module in modules for held in (module._modules, module._parameters)]
        own = (p for module in modules for p in module._parameters.values() if p is not None)
        self._own = [instead.get(id(p), p) for p in own]
        self._swapped = Swapped(self.model)
        ids, trained = self._model_now()
        swapped = self._swapped.now()
        self._seen_model = [tuple(swapped.get(key, key) for key in found) for found in ids], trained

    def _model_now(self) -> tuple[list[Any], list[bool]]:
        ids = [tuple(map(id, held.values())) for held in self._children]
        return ids, list(map(REQUIRES_GRAD, self._own))

    def _model_changed(self) -> bool:
        """Since the last call; asked before every forward, and therefore without the names of anything."""
        ids, trained = now = self._model_now()
        if now == self._seen_model:
            return False
        instead = self._swapped.now()  # FSDP swaps parameters while the model runs
        if trained == self._seen_model[1] and instead:
            ids = [tuple(instead.get(key, key) for key in found) for found in ids]
            if ids == self._seen_model[0]:
                return False
        self._remember_model()
        return True

    def _require_forward(self) -> None:
        if self._capture is not None and self._capture.notes is None:
            evaluating = not self.model.training
            raise LayerwiseError(
                describe(
                    f"a step of {type(self).__name__} before it has seen a training forward of its model"
                    + (", which is in eval mode" if evaluating else ""),
                    "model(x) in train mode, with gradients, after the optimizer was built",
                    "call model.train() before the loop (from_pretrained returns a model in eval mode)"
                    if evaluating
                    else "build the optimizer before torch.compile and call the model itself, not its parts",
                )
            )

    def _context(self, stack: Stack, examples: int) -> Context:
        step, group = self.steps_taken, stack.group
        options = {k: group[k] for k in group.keys() - OWN_MOMENTUM} if stack.fallback else group
        damping = float(group["damping"])
        if self._damping.schedule is not None:
            damping = self._damping.at(group, max(step, 1))
        return Context(
            step,
            float(group["lr"]) * (float(group.get("fallback_ratio", 1.0)) if stack.fallback else 1.0),
            damping,
            self._damping.relative,
            options,
            stack.backend,
            self._health,
            stack.shape,
            examples,
            observes=(step - 1) % self.factor_every == 0,
            batches=1 + (step - 1) // self.factor_every,
            unit=self._unit or 1.0,
            memory=stack.memory,
        )

    # --- report ------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """What every parameter gets, and why."""
        self.follow_model()
        rows = []
        group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        params = named_parameters(self.model)
        for spec in self.table.layers:
            group = group_of.get(id(params[spec.parameters[0]]))
            if group is None:
                continue
            rule = self.rule_for(spec, group)
            shape = self._shape_of(rule, spec, group)
            rows.append(layer_row(spec, rule.describe(shape), self._reason(spec, group)))
        return table("\n".join([self._headline(), *group_lines(self.param_groups)]), rows)

    def _headline(self) -> str:
        options = self.param_groups[0]
        relative = "relative" if self._damping.relative else "absolute"
        settings = {
            **({} if (betas := self._size.betas) is None else {"betas": betas}),
            **of_group(options),
            "scale": self._size.method,
            "clip": self._clip.describe(),
            "damping": f"{options['damping']:g} {relative}",
            "estimator": self._settings["estimator"] if self.requires.outgrads else None,
            "likelihood": self._likelihood_words() if self.requires.outgrads else None,
            "factor_every": self.factor_every,
            "refresh_every": self.refresh_every,
            "loss_average": None if self._scale.average == "auto" else str(self._scale.average),
            "accumulate": self._scale.accumulate,
            "grad_scaler": None if self._scale.scaler is None else type(self._scale.scaler).__name__,
        }
        return headline(type(self).__name__, settings)

    def _likelihood_words(self) -> str | None:
        """As it was given, or recognised."""
        given, found = self._settings["likelihood"], self._settings["recognised"]
        if given == "auto":
            return f"auto ({found or 'not seen yet'})"
        return given if given is None or isinstance(given, str) else type(given).__name__

    def health(self) -> Health:
        """Refreshes, what was skipped or fell back, condition numbers and damping by layer."""
        if self._stacks is not None:
            self._executor.settle()
        self._health.settle()
        for stack in self._stacks or []:
            measure(stack, self._context(stack, 1), self._health)
        return self._health


show_options(Layerwise.__init__, Layerwise.__init__, ())


def _fallback_ratio(fallback_lr: float, lr: float) -> float:
    """Its proportion to the learning rate, which it keeps under schedules."""
    check_number("fallback_lr", fallback_lr)
    if not lr:
        expected = "a learning rate above 0, to which fallback_lr keeps its proportion"
        raise InputError(describe("fallback_lr with lr=0", expected, 'use overrides={"*": {"lr": 0.0}} instead'))
    return fallback_lr / lr


def _number(loss: Any) -> float:
    return float(loss.detach() if isinstance(loss, Tensor) else loss)
