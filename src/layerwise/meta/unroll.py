"""Meta-gradients through any inner loop: unroll the steps, judge the end, go back step by step.

The inner loop is a function ``step(state, meta, batch) → state``, written with torch operations; the state and the
batches are nested dictionaries, lists or tuples of tensors, the meta-parameters a dictionary of tensors. States and
batches are kept on the way and each step is computed again on the way back, with the same random numbers, so that
memory grows with the size of a state and a batch and not with the graph of a step; and every step's part of the
derivative is seen, so that the step at which it stopped being a number is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from layerwise.foundations.errors import InputError, describe
from layerwise.meta.checks import whole

Tree = Any
"""A tensor, or dictionaries, lists and tuples of them."""
Meta = Mapping[str, Tensor]
Step = Callable[[Tree, Any, Any], Tree]
Objective = Callable[[Tree, Any], Tensor]
Update = Callable[[Tree, Tree, Tree, Any], tuple[Tree, Tree]]
Batches = Callable[[int], Any] | Sequence | None
BATCH_NORM = "call model.eval(), or make it with track_running_stats=False"


class Fault(NamedTuple):
    """Where a meta-gradient stopped being a number."""

    phase: str
    """"forward": the inner loop diverged; "objective": the meta-objective of a state is not finite;
    "backward": the derivative overflowed on the way back."""
    step: int
    """Steps that had been made: 1 is the state after the first."""

    def __str__(self) -> str:
        what = {
            "forward": f"the state is not finite from step {self.step} on",
            "objective": f"the states are finite, but the meta-objective after step {self.step} is not",
            "backward": f"on the way back the derivative is not finite from step {self.step} on",
        }
        return what[self.phase]


@dataclass(frozen=True, eq=False)
class Unrolled:
    """A meta-objective, its gradient, and how the numbers behaved."""

    value: Tensor
    """The meta-objective: of the last state, or the mean over states; over tasks, too."""
    gradient: dict[str, Tensor]
    """Its derivative in each meta-parameter, as it came out: see `fault` before you use it."""
    state: Tree
    """The last state, to go on from."""
    fault: Fault | None
    """Where a number was not finite first, or None."""

    @property
    def vanished(self) -> bool:
        """Whether every derivative is exactly zero, as one is that underflowed."""
        return all(not bool(g.count_nonzero()) for g in self.gradient.values())


def unrolled(
    step: Step,
    state: Tree,
    meta: Meta,
    *,
    steps: int,
    objective: Objective,
    batches: Batches = None,
    judged: Batches = None,
    average: bool = False,
    truncate: int | None = None,
    tasks: bool = False,
    dtype: torch.dtype | None = None,
) -> Unrolled:
    """The meta-objective after some inner steps, and its gradient in the meta-parameters.

    Args:
        step: one inner step, ``step(state, meta, batch) → state``; `inner_step` makes one from a loss and an update. It
            must differentiate with `torch.func.grad`, not with ``backward``, and may draw random numbers, as dropout
            does, but from torch's own generator only: the step is computed twice, from the same state of that.
        state: where the inner loop starts. Integers in it are carried along.
        meta: the meta-parameters.
        steps: t ≥ 1.
        objective: ``objective(state, batch)``, a single number: the training loss for train-by-train, the loss on
            held-out examples for train-by-validation.
        batches: what `step` gets: a function of the step's number 0, 1, …, called once for each, or a sequence of t;
            None for none.
        judged: the same for `objective`, by the number of the state 1, …, t (item k − 1 of a sequence).
        average: the mean of `objective` over the states 1, …, t, rather than that of the last.
        truncate: go back through so many steps only; what came before is taken as given. None: through all.
        tasks: several inner problems at once: all tensors of states and batches have a first axis of tasks, `step` and
            `objective` are written for one, and the mean over tasks is differentiated.
        dtype: compute in this precision, such as torch.float64; None: as given.

    >>> def step(w, meta, batch):
    ...     return w - meta["lr"] * w                      # gradient descent on ½w²
    >>> found = unrolled(step, torch.tensor(1.0), {"lr": torch.tensor(0.5)}, steps=2, objective=lambda w, _: 0.5 * w**2)
    >>> float(found.value), float(found.gradient["lr"])    # ½(1 − η)⁴ and −2(1 − η)³
    (0.03125, -0.25)
    >>> wild = unrolled(step, torch.tensor(1.0), {"lr": torch.tensor(1e9)}, steps=9, objective=lambda w, _: 0.5 * w**2)
    >>> print(wild.fault)
    the state is not finite from step 5 on
    """
    steps = whole(steps, "steps")
    back = steps if truncate is None else min(whole(truncate, "truncate"), steps)
    meta = {name: _cast(value.detach(), dtype) for name, value in checked(meta).items()}
    state, feed, judge = _cast(_detached(state), dtype), _feed(batches, steps, dtype), _feed(judged, steps, dtype)
    step, objective = _over_tasks(step, _single(objective), state) if tasks else (step, _single(objective))
    random = _Random([state, meta])

    states, values = [state], []
    stepped: list[_Call] = []
    valued: dict[int, _Call] = {}
    with torch.no_grad():
        for k in range(steps):
            stepped.append(_Call(feed(k), random.get()))
            states.append(_detached(step(states[-1], meta, stepped[-1].batch)))
            if average or k == steps - 1:
                valued[k] = _Call(judge(k), random.get())
                values.append(objective(states[-1], valued[k].batch))
    flags = {"forward": [_finite(s) for s in states[1:]], "objective": [_finite(v) for v in values], "backward": []}
    weight = 1 / steps if average else 1.0
    cotangent = [torch.zeros_like(leaf) for leaf in _floats(states[-1])]
    total = {name: torch.zeros_like(value) for name, value in meta.items()}
    with torch.random.fork_rng(random.devices):
        for k in range(steps - 1, steps - 1 - back, -1):
            if k in valued:
                random.set(valued[k].random)
                pulled = _objective_gradient(objective, states[k + 1], valued[k].batch)
                cotangent = [c + weight * p for c, p in zip(cotangent, pulled, strict=True)]
            random.set(stepped[k].random)
            cotangent, part = _step_back(step, states[k], meta, stepped[k].batch, cotangent)
            total = {name: total[name] + part[name] for name in total}
            flags["backward"].append(_finite([cotangent, part]))
    value = torch.stack(values).mean()
    return Unrolled(value=value, gradient=total, state=states[-1], fault=_fault(flags, steps))


def inner_step(loss: Objective, update: Update) -> Step:
    """An inner step from a loss and an optimizer-like update; its state is ``{"params": …, "memory": …}``.

    Args:
        loss: ``loss(params, batch)``, the inner objective; `functional` makes one from a module.
        update: ``update(gradients, memory, params, meta) → (changes, memory)``: what is added to the parameters, and
            what the optimizer remembers, such as momentum; None where it remembers nothing.

    >>> step = inner_step(lambda w, batch: 0.5 * (w**2).sum(), sgd)
    >>> step({"params": torch.tensor([1.0]), "memory": None}, {"lr": torch.tensor(0.5)}, None)["params"]
    tensor([0.5000])
    """

    def step(state: Tree, meta: Meta, batch: Any) -> Tree:
        gradients = grad(loss)(state["params"], batch)
        changes, memory = update(gradients, state["memory"], state["params"], meta)
        params = pytree.tree_map(lambda p, change: p + change, state["params"], changes)
        return {"params": params, "memory": memory}

    return step


def sgd(gradients: Tree, memory: Tree, params: Tree, meta: Meta) -> tuple[Tree, Tree]:
    """Gradient descent with the step size ``meta["lr"]``: an update for `inner_step`."""
    return pytree.tree_map(lambda g: -meta["lr"] * g, gradients), memory


def functional(model: nn.Module, criterion: Callable[[Tensor, Tensor], Tensor]) -> tuple[Objective, dict[str, Tensor]]:
    """A module as a loss of its parameters and a batch (x, y), and the parameters it has now.

    Batch normalisation must not change running averages, which are no parameters: see to that by ``model.eval()`` or
    ``track_running_stats=False``.

    >>> loss, params = functional(nn.Linear(3, 2), nn.functional.cross_entropy)
    >>> loss(params, (torch.ones(4, 3), torch.zeros(4, dtype=torch.long))).shape
    torch.Size([])
    """
    tracking = [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats]

    def loss(params: Tree, batch: Any) -> Tensor:
        for norm in tracking:
            if norm.training:
                given = f"a {type(norm).__name__} that updates running averages"
                raise InputError(describe(given, "a function of parameters and batch", BATCH_NORM))
        x, y = batch
        return criterion(functional_call(model, params, (x,)), y)

    return loss, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


# --- one step back ----------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """What a step or an objective was called with, to be called so again."""

    batch: Any
    random: list[Tensor]


class _Random:
    """The state of torch's random numbers on the CPU and on the CUDA devices that are used."""

    def __init__(self, tree: Tree) -> None:
        leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
        self.devices = sorted({leaf.device.index for leaf in leaves if leaf.is_cuda})

    def get(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self.devices)]

    def set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self.devices, states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)


def _step_back(
    step: Step, state: Tree, meta: Meta, batch: Any, cotangent: list[Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    leaves, shape = pytree.tree_flatten(state)
    where = [i for i, leaf in enumerate(leaves) if _is_float(leaf)]

    def floats(parts: list[Tensor], meta: Meta) -> list[Tensor]:
        now = list(leaves)
        for i, part in zip(where, parts, strict=True):
            now[i] = part
        return _floats(step(pytree.tree_unflatten(now, shape), meta, batch))

    pull = vjp(floats, [leaves[i] for i in where], dict(meta))[1]
    return pull(cotangent)


def _objective_gradient(objective: Objective, state: Tree, batch: Any) -> list[Tensor]:
    leaves, shape = pytree.tree_flatten(state)
    where = [i for i, leaf in enumerate(leaves) if _is_float(leaf)]

    def of_floats(parts: list[Tensor]) -> Tensor:
        now = list(leaves)
        for i, part in zip(where, parts, strict=True):
            now[i] = part
        return objective(pytree.tree_unflatten(now, shape), batch)

    return grad(of_floats)([leaves[i] for i in where])


def _over_tasks(step: Step, objective: Objective, state: Tree) -> tuple[Step, Objective]:
    leaves = [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]
    sizes = {leaf.shape[0] if leaf.ndim else 0 for leaf in leaves}
    if len(sizes) != 1 or 0 in sizes:
        given = f"states of {sorted(sizes)} tasks"
        raise InputError(describe(given, "a first axis of tasks, alike in all tensors", "stack the tasks' states"))

    def all_steps(state: Tree, meta: Meta, batch: Any) -> Tree:
        return _mapped(lambda state, batch: step(state, meta, batch), state, batch)

    def mean(state: Tree, batch: Any) -> Tensor:
        return _mapped(objective, state, batch).mean()

    return all_steps, mean


def _mapped(function: Callable[[Tree, Any], Tree], *trees: Tree) -> Tree:
    """`function` of each task; what is no tensor, such as None, is given to all of them and comes back once."""
    leaves, shape = pytree.tree_flatten(trees)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    others: list[Any] = []

    def of_tensors(parts: list[Tensor]) -> list[Tensor]:
        now = list(leaves)
        for i, part in zip(where, parts, strict=True):
            now[i] = part
        found, spec = pytree.tree_flatten(function(*pytree.tree_unflatten(now, shape)))
        others[:] = [spec, [None if isinstance(leaf, Tensor) else (leaf,) for leaf in found]]
        return [leaf for leaf in found if isinstance(leaf, Tensor)]

    results = iter(vmap(of_tensors, randomness="different")([leaves[i] for i in where]))
    spec, kept = others
    return pytree.tree_unflatten([next(results) if other is None else other[0] for other in kept], spec)


def _feed(batches: Batches, steps: int, dtype: torch.dtype | None) -> Callable[[int], Any]:
    if batches is None:
        return lambda k: None
    if callable(batches):
        return lambda k: _cast(batches(k), dtype)
    if not (hasattr(batches, "__len__") and hasattr(batches, "__getitem__")):
        given = f"batches of type {type(batches).__name__}"
        raise InputError(describe(given, "a sequence, or a function of the step's number", "pass list(batches)"))
    if len(batches) != steps:
        given = f"{len(batches)} batches for {steps} steps"
        raise InputError(describe(given, "one for each step", "give so many, or a function of the step's number"))
    return lambda k: _cast(batches[k], dtype)


def checked(meta: Meta) -> Meta:
    """Meta-parameters: tensors of finite numbers, one or more.

    >>> list(checked({"lr": torch.tensor(0.1)}))
    ['lr']
    """
    if not isinstance(meta, Mapping) or not meta or not all(_is_float(value) for value in meta.values()):
        given = f"meta of type {type(meta).__name__}" + (f" with {list(meta)}" if isinstance(meta, Mapping) else "")
        do = 'pass e.g. {"lr": torch.tensor(0.1)}'
        raise InputError(describe(given, "a dictionary of floating-point tensors, one or more", do))
    for name, value in meta.items():
        if not bool(torch.isfinite(value).all()):
            raise InputError(describe(f"meta[{name!r}] that is not finite", "finite numbers", "start from another"))
    return meta


def _fault(flags: Mapping[str, list[Tensor]], steps: int) -> Fault | None:
    """Read all flags at once: a device is waited for once and not at every step."""
    phases = [phase for phase, found in flags.items() for _ in found]
    fine = torch.stack([flag for found in flags.values() for flag in found]).tolist()
    if all(fine):
        return None
    first = fine.index(False)
    within = first - phases.index(phases[first])
    at = steps - len(flags["objective"]) + within + 1  # of one or of all states, the last is that of step t
    return Fault(phases[first], {"forward": within + 1, "objective": at, "backward": steps - within}[phases[first]])


def _single(objective: Objective) -> Objective:
    def number(state: Tree, batch: Any) -> Tensor:
        value = objective(state, batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
            do = "take its mean and no .item(); tasks=True averages over tasks itself"
            raise InputError(describe(f"an objective of {what}", "a tensor of a single number", do))
        return value.reshape(())

    return number


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _floats(tree: Tree) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if _is_float(leaf)]


def _finite(tree: Tree) -> Tensor:
    return torch.stack([torch.isfinite(leaf).all() for leaf in _floats(tree)]).all()


def _detached(tree: Tree) -> Tree:
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def _cast(tree: Tree, dtype: torch.dtype | None) -> Tree:
    if dtype is None:
        return tree
    return pytree.tree_map(lambda leaf: leaf.to(dtype) if _is_float(leaf) else leaf, tree)
