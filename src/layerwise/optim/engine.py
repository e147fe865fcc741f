"""`Layerwise`: the one optimizer. Hooks, schedules, groups, state and health; a rule gives the direction.

    scale="formula"   W ← (1 − η·decay) W − η · momentum(clip(graft(P⁻ᵖ ∇L Q⁻ᑫ)))
    scale="adam"      W ← (1 − η·decay) W − η · clip(D · ‖AdamW's update‖/‖D‖),  D = P⁻ᵖ m Q⁻ᑫ, m the averaged gradient

See `step.update` for the order in which a step happens.
"""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from layerwise.distributed.exchange import mean_over_ranks
from layerwise.distributed.processes import Processes
from layerwise.foundations.errors import LayerwiseError
from layerwise.foundations.likelihoods import Likelihood
from layerwise.foundations.random import seed_of
from layerwise.foundations.sharded import Division, all_agree, is_sharded, local, named_parameters, tensor_parallel
from layerwise.layers.matrices import Matrices
from layerwise.layers.table import LayerSpec, LayerTable
from layerwise.optim.build import ASKS, LIKELY_PRECISION, Builder, prepare_device
from layerwise.optim.checkpoint import Checkpointed
from layerwise.optim.choice import Choice, Group, check_rule, rule_of
from layerwise.optim.model_changes import ModelSnapshot
from layerwise.optim.options import (
    LIKELIHOOD,
    LOSS_AVERAGE,
    Execution,
    Overrides,
    Refresh,
    Statistics,
    about_unknown,
    fallback_rule,
    group_defaults,
    grouped,
    parameter_groups,
    positive,
    show_options,
)
from layerwise.optim.parameters import BareParameters, model_of
from layerwise.optim.report import Notices, group_lines, headline, layer_row, measure, of_group, table
from layerwise.optim.rule import Context, Health, UpdateRule
from layerwise.optim.sharding.plan import Plan
from layerwise.optim.solver import check_solver
from layerwise.optim.statistics.accumulate import Accumulator, Moments, Sums
from layerwise.optim.statistics.hooks import Capture, Seen
from layerwise.optim.statistics.labels import Labels
from layerwise.optim.statistics.loss_scale import LossScale
from layerwise.optim.statistics.output import OutputReader
from layerwise.optim.step.clip import Clip
from layerwise.optim.step.damping import Damping
from layerwise.optim.step.graft import Graft
from layerwise.optim.step.stack import Stack
from layerwise.optim.step.update import SolveTogether, UpdateSize, unit_of
from layerwise.optim.tensor_parallel import divisions, without_statistics

OWN_MOMENTUM = {"momentum", "nesterov", "betas"}
"""Options of the optimizer's own rule, which a fallback that averages by itself does not take."""


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
        factor_every: steps between statistics, from the first step on.
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

    _precision: str | None = None
    """That the first gradients have chosen, on a GPU."""
    _asks_left: int = 0
    """At how many steps gradients may still be asked for it, because those of before said nothing."""
    _rehearsed: str | None = None
    """The precision whose kernels are compiled already, or are being."""
    _solve_together: SolveTogether | None = None
    """For members that look at all layers at once."""
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
        self.rule = rule or rule_of(left, right, power, basis, damping_split, max_factor)
        if rule is not None:
            check_rule(rule)
        self.requires = self.rule.requirements()
        self.model = model_of(model, self.rule, type(self).__name__)
        prepare_device(self.model)
        check_solver(self._how[1].solver, self.requires.powers)
        self.fallback = fallback_rule(update_fallback, betas)
        self._damping = Damping(damping, damping_scale)
        self._graft, self._clip, self._size = Graft(graft), Clip.read(clip), UpdateSize(scale, betas)
        self._size.check(self.rule, graft)
        if betas is not None and self.requires.own_momentum is None:
            momentum = betas[0]
        self.factor_every = positive("factor_every", factor_every)
        self.refresh_every = positive("refresh_every", refresh_every)
        self._scale = LossScale(loss_average, accumulate, grad_scaler)
        self._labels = Labels(estimator, likelihood, self._how[0].samples)
        self.separate_bias = scale == "adam" if separate_bias is None else separate_bias
        self._matrices = matrices
        self.table = self._read_table()
        self._loaded, self._divided = {}, dict[str, Division]()
        self._health, self._notices, self.processes = Health(), Notices(), Processes()
        numbers = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        numbers |= {"damping": self._damping.initial, "factor_decay": factor_decay}
        defaults = group_defaults(self.rule, numbers, fallback_lr)
        super().__init__(parameter_groups(self.model, self.table, overrides or {}, defaults), defaults)
        self.steps_taken = 0
        self._snapshot = ModelSnapshot(self.model)
        self._accumulator = self._make_accumulator()
        self._capture = self._make_capture(self._how[0].example_axis, seed_of(seed))
        self.param_groups[0]["engine"] = self._engine()
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
            found = found.demote(without_statistics(found, tensor_parallel(self.model)))
        only_gradients = requires.matrices_only and not (requires.inputs or requires.outgrads)
        return found.with_matrices(self.model) if only_gradients else found

    @property
    def host_may_sync(self) -> bool:
        """Whether the host may look at values of tensors. On a GPU it would wait for the whole backward."""
        return self.param_groups[0]["params"][0].device.type == "cpu"

    def _make_accumulator(self) -> Accumulator:
        found, known = Accumulator(self.requires, self._how[0].sharing, self.processes), dict[str, Moments | None]()
        optimizer = weakref.ref(self)  # nothing that the model's hooks reach may keep it alive

        def moments(spec: LayerSpec) -> Moments | None:
            owner = optimizer()
            if owner is not None and spec.name not in known:
                known[spec.name] = owner._choice.moments_of(spec, owner.param_groups)
            return known.get(spec.name)

        found.moments, found.ask_again = moments, known.clear
        if not self.host_may_sync:
            from layerwise.optim.cuda.rows import KeptRows

            found.rows = KeptRows(self.requires)
        return found

    def _make_capture(self, example_axis: int | None, seed: int) -> Capture | None:
        requires, labels, law = self.requires, self._labels, self._labels.law()
        if not (requires.inputs or requires.outgrads):
            return None
        self._divided = divisions(self.model, requires, type(self).__name__)
        estimator = labels.decide(law, requires.outgrads)
        found = Capture(self.model, self.table, estimator, law, labels.samples, seed, self._scale, example_axis)
        found.observe, found.observe_rows = self._accumulator.add, self._accumulator.add_rows
        weakref.finalize(self, found.remove).atexit = False
        optimizer = weakref.ref(self)

        def before_a_forward() -> None:
            owner = optimizer()
            if owner is not None:
                owner._follow_changes()

        found.before_a_forward = before_a_forward
        asks = labels.likelihood == "auto" and requires.outgrads and labels.recognised is None
        if asks or self._scale.given:
            found.reader = OutputReader(self._scale, asks)
        found.needs_examples = requires.examples and not requires.moments
        self._divide(found)
        found.scale_free = self._scale_free and requires.outgrads
        return found

    def _follow_changes(self) -> None:
        """If the model has changed since this was last asked."""
        if not self._snapshot.changed():
            return
        if self._capture is not None:
            try:
                self._divided = divisions(self.model, self.requires, type(self).__name__)
            except LayerwiseError:  # refused, and refused again at the next forward
                self._snapshot.ask_again()
                raise
        self.follow_model()
        self._divide(self._capture)

    def _divide(self, capture: Capture | None) -> None:
        """Tell a capture which ranks have its batch, and what it sees of the layers that they divide."""
        if capture is not None:
            of_batch = next((division.ranks for division in self._divided.values()), None)
            capture.draws_as = None if of_batch is None else min(of_batch)
            # Squares of examples are of whole ones, in bases that need not be block-diagonal.
            capture.blocks = self._how[0].tensor_parallel == "blocks" and not self.requires.examples

    @property
    def _scale_free(self) -> bool:
        """Whether steps do not depend on the loss's scale."""
        return self._size.method == "adam" and not self.requires.loss_scale

    # --- build -------------------------------------------------------------------------------------------

    @property
    def _choice(self) -> Choice:
        _, refresh, execution = self._how
        precision = self._precision or execution.precision
        return Choice(self.rule, self.fallback, self._size, refresh.solver, precision, self.host_may_sync)

    def rule_for(self, spec: LayerSpec, group: Group) -> UpdateRule:
        """The rule that a layer gets: the optimizer's own, or the fallback's."""
        return self._choice.rule_for(spec, group)

    @property
    def _builder(self) -> Builder:
        accumulator, every = self._accumulator, self.refresh_every
        parts = (self._health, self._damping, self._clip, self._graft, self._size, accumulator, every)
        draws = self.requires.outgrads and self._labels.may_draw
        how = (self._how, parts, self.factor_every, draws, self._precision, self._divided)
        return Builder(self.model, self.table, self.param_groups, self._choice, *how)

    def _build(self) -> list[Stack]:
        """Stacks of the layers, after the model was examined, if it is; and what steps with them."""
        if self._capture is not None:
            self.table = self._capture.table
        built = self._builder.build(self._loaded, self._shared, self._rehearse)
        self._executor, self._precision, self._sharding, self._on_one_rank = built
        asks = self._precision is None and self._sharding is None and self._builder.asks_for_precision
        self._asks_left = ASKS if asks else 0
        return self._executor.stacks

    def _ask_for_precision(self) -> None:
        """Where no gradient of a matrix has said in how many bits products are to be: layers were frozen, or all of
        their gradients zero. With the first that does the stacks are built anew, with what they hold."""
        from layerwise.optim.cuda.precision import chosen

        if self._on_one_rank is not None:
            self._on_one_rank.begin()
        own = (p for stack in self._stacks or [] if stack.rule is self.rule for p in stack.params.values())
        grads = [p.grad for p in own if p.grad is not None]
        precision = chosen(grads)
        self._asks_left -= len(grads) > 0
        if precision is not None:
            self._loaded, self._shared, self._precision = self._saved(), None, precision
            self._stacks = self._build()
            self._loaded = {}

    def _rehearse(self, likely: str) -> None:
        """On a GPU, begin to compile the kernels of a step in the background: at construction, and at the first step if
        gradients ask for another precision than is likely."""
        asked, first = self._how[2].precision, self.param_groups[0]["params"][0]
        precision = likely if asked == "auto" else asked
        if first.device.type != "cuda" or is_sharded(first) or self._rehearsed == precision or self._damping.adaptive:
            return
        from layerwise.optim.cuda.rehearsal import rehearse

        self._rehearsed = precision
        rehearse(lambda: self._builder.stand_in(precision), lambda stack: self._context(stack, 1), first.device)

    def plan_for(self, ranks: int, copies: int = 1) -> Plan:
        """The plan of this model sharded by `fully_shard` over so many ranks, `copies` times (HSDP), without any.

        >>> import torch, layerwise as lw
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
        >>> plan = lw.optim.Shampoo(model).plan_for(2)
        >>> [(duty.layer, duty.owner) for duty in plan.duties], plan.gradient_bytes(0)
        ([('0', 0), ('2', 1)], 1280)
        """
        return self._builder.plan(ranks, copies)

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
        device, what = local(self.param_groups[0]["params"][0]).device, "losses for adaptive damping"
        mean = partial(mean_over_ranks, self.processes, device=device, what=what)
        ratio = self._damping.after(float(loss), before, mean)
        for group in self.param_groups:  # each group keeps its own proportion
            group["damping"] *= ratio

    @torch.no_grad()
    def _step(self) -> None:
        """Everything but the loss. Not under the user's autocast or inference mode: steps have arithmetic of their
        own."""
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") or torch.is_inference_mode_enabled():
            cuda = torch.autocast("cuda", enabled=False) if torch.is_autocast_enabled("cuda") else nullcontext()
            with torch.inference_mode(False), torch.autocast("cpu", enabled=False), cuda, torch.no_grad():
                self._step()
            return
        self._follow_changes()
        self._snapshot.require_known(self.param_groups)
        if self._is_idle():
            return
        capture, counts = self._capture, None if self._capture is None else self._capture.collect()
        if self._stacks is None and self._is_sharded() and not self._begin():
            return  # who owns a layer's statistics must be known before they are sent
        seen, counted = self._statistics(counts)
        if self._stacks is None and not self._begin():
            return
        if self._asks_left and self.steps_taken:
            self._ask_for_precision()
        due = counts if capture is not None and capture.due else None
        if due is not None and due.examples and (self._notices.unseen != set() or not due.layers):
            own = [stack for stack in self._stacks or [] if stack.rule is self.rule]
            self._notices.of_statistics(type(self).__name__, self.steps_taken + 1, own, seen, due.layers)
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
        options = dict[int, dict[str, Any]]()
        contexts = [self._context(stack, examples, options) for stack in self._stacks or []]
        if self._on_one_rank is not None:
            self._on_one_rank.begin()
        self._executor.run(contexts, seen, scale, self._solve_together)
        if self._on_one_rank is not None:
            self._on_one_rank.end()
        if capture is not None:
            capture.due = self._statistics_are_due(self.steps_taken + 1)

    def _statistics(self, counts: Seen | None) -> tuple[dict[str, Sums], tuple[int, int]]:
        """What was seen of each layer since the last step, and of how many examples and tokens: of all processes, and
        free of the loss's scale where steps are to be."""
        capture, accumulator, sharding, seen = self._capture, self._accumulator, self._sharding, dict[str, Sums]()
        counted = (0, 0) if counts is None else (counts.examples, counts.tokens)
        if sharding is not None:
            seen = sharding.take_census(accumulator.take(), counted)
            counted = sharding.census.counted
        elif capture is not None and self.processes.count > 1:
            device = self.param_groups[0]["params"][0].device
            seen = accumulator.take_all(capture.table.layers, device, counted)
            counted = accumulator.counted
        elif capture is not None:
            seen = accumulator.take()
        if capture is not None and counts is not None and capture.reads_output:
            may_sync = self.host_may_sync or self.requires.examples
            self._labels.read(type(self).__name__, capture, counts, seen, self.processes, may_sync)
        if self._unit is None and self._size.method == "adam":
            params = (p for group in self.param_groups for p in group["params"])
            self._unit = unit_of(params) if sharding is None else sharding.unit()
        return seen if sharding is None else sharding.send_statistics(seen), counted

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

    def _begin(self) -> bool:
        """The first step builds the stacks; returns whether it can be taken: not with gradients that are not finite,
        before the model is known."""
        if self._capture is not None and self._capture.notes is None:
            grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            if not all_agree(self.model, all(bool(torch.isfinite(local(grad)).all()) for grad in grads)):
                self._health.steps, self._health.skipped_steps = self._health.steps + 1, self._health.skipped_steps + 1
                return False
            self._capture.require_forward(type(self).__name__)
        self._stacks = self._build()
        self._loaded, self._shared = {}, None  # which the stacks have taken
        self._notices.unseen = None
        self._notices.of_fallback(type(self).__name__, self._choice, self._stacks, self.model)
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, and statistics of a step that was never taken (a gradient scaler leaves steps out)."""
        super().zero_grad(set_to_none)
        self._accumulator.take()
        if self._capture is not None:
            self._capture.forget()
            if self._capture.reader is not None:
                self._capture.reader.forget()

    def _statistics_are_due(self, step: int) -> bool:
        """Whether a step takes statistics."""
        return (step - 1) % self.factor_every == 0

    def _context(self, stack: Stack, examples: int, known: dict[int, dict[str, Any]] | None = None) -> Context:
        """What a stack's rule is told; `known` are the options of fallbacks by group, the same for many stacks."""
        step, group = self.steps_taken, stack.group
        options = group
        if stack.fallback:
            known = {} if known is None else known
            if id(group) not in known:
                known[id(group)] = {k: group[k] for k in group.keys() - OWN_MOMENTUM}
            options = known[id(group)]
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
            observes=self._statistics_are_due(step),
            refresh_every=self.refresh_every,
            unit=self._unit or 1.0,
            memory=stack.memory,
        )

    # --- report ------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """What every parameter gets, and why."""
        self.follow_model()
        choice, group_of, params = self._choice, self._builder.group_of(), named_parameters(self.model)
        groups = [(spec, group_of.get(id(params[spec.parameters[0]]))) for spec in self.table.layers]
        rows = [layer_row(spec, choice, group) for spec, group in groups if group is not None]
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
            "estimator": self._labels.estimator if self.requires.outgrads else None,
            "likelihood": self._labels.words() if self.requires.outgrads else None,
            "factor_every": self.factor_every,
            "refresh_every": self.refresh_every,
            "loss_average": None if self._scale.average == "auto" else str(self._scale.average),
            "accumulate": self._scale.accumulate,
            "grad_scaler": None if self._scale.scaler is None else type(self._scale.scaler).__name__,
        }
        return headline(type(self).__name__, settings)

    def health(self) -> Health:
        """Refreshes, what was skipped or fell back, condition numbers and damping by layer."""
        if self._stacks is not None:
            self._executor.settle()
        self._health.settle()
        for stack in self._stacks or []:
            measure(stack, self._context(stack, 1), self._health)
        return self._health


show_options(Layerwise.__init__, Layerwise.__init__, ())


def _number(loss: Any) -> float:
    return float(loss.detach() if isinstance(loss, Tensor) else loss)
