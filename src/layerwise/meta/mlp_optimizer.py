"""An optimizer that is itself a small network, applied to each weight alone: Metz et al. (2019), as in Wu (2023), D.6.

For each weight 31 features: gradient, value, five moving averages of the gradient and of its square, the averages
divided by the roots of the squares, one over those roots, and nine numbers that say how many steps were made. All but
the last nine are normalised over the weights of the network to mean 0 and standard deviation 1. A network with one
hidden layer makes of them a direction and a magnitude, and the weight moves by −scale · direction · exp(scale ·
magnitude). The hidden layer (32 units) and both scales (10⁻³) are those of the code that the thesis names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from layerwise.foundations.errors import InputError, UnsupportedError, describe
from layerwise.meta.checks import whole
from layerwise.meta.unroll import Meta, Tree

DECAYS = (0.5, 0.9, 0.99, 0.999, 0.9999)
SCALES = (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0, 300000.0)
"""Of the embedding of the step's number, tanh(step / scale)."""
NORMALISED = 2 + 4 * len(DECAYS)
FEATURES = NORMALISED + len(SCALES)
SCALE = 1e-3
EPS = 1e-6


def mlp_parameters(hidden: int = 32, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Meta-parameters to start from: Gaussian weights of variance 1/fan-in, no biases.

    >>> {name: tuple(p.shape) for name, p in mlp_parameters().items()}
    {'W1': (31, 32), 'b1': (32,), 'W2': (32, 2), 'b2': (2,)}
    """
    whole(hidden, "hidden", 32)
    return {
        "W1": torch.randn(FEATURES, hidden, generator=generator) / math.sqrt(FEATURES),
        "b1": torch.zeros(hidden),
        "W2": torch.randn(hidden, 2, generator=generator) / math.sqrt(hidden),
        "b2": torch.zeros(2),
    }


def mlp_memory(params: Tree, tasks: bool = False) -> dict[str, Tensor]:
    """What the optimizer remembers at the start: no averages, no steps.

    Args:
        params: what will be trained.
        tasks: whether the first axis of all parameters is one of tasks, each with a memory of its own.

    >>> memory = mlp_memory({"w": torch.ones(2, 3)})
    >>> memory["first"].shape
    torch.Size([6, 5])
    """
    flat = _flat(params, int(tasks))
    averages = flat.new_zeros(*flat.shape, len(DECAYS))
    return {"first": averages, "second": averages.clone(), "step": flat.new_zeros(flat.shape[:-1])}


def mlp_update(gradients: Tree, memory: Tree, params: Tree, meta: Meta) -> tuple[Tree, Tree]:
    """The learned update, for `inner_step`: changes of the parameters, and the memory after them.

    A stack of tasks, whose memory was made with ``tasks=True``, is updated at once, each task by itself.

    >>> params = {"w": torch.randn(4, 3)}
    >>> changes, memory = mlp_update(params, mlp_memory(params), params, mlp_parameters())
    >>> changes["w"].shape, int(memory["step"])
    (torch.Size([4, 3]), 1)
    """
    axes = memory["step"].ndim
    g, w = _flat(gradients, axes), _flat(params, axes)
    decay = torch.tensor(DECAYS, dtype=g.dtype, device=g.device)
    first = decay * memory["first"] + (1 - decay) * g[..., None]
    second = decay * memory["second"] + (1 - decay) * (g * g)[..., None]
    output = _network(features(g, w, first, second), embedding(memory["step"]), meta)
    change = -SCALE * output[..., 0] * (SCALE * output[..., 1]).exp()
    return _shaped(change, params, axes), {"first": first, "second": second, "step": memory["step"] + 1}


def features(
    g: Float[Tensor, "*T P"],
    w: Float[Tensor, "*T P"],
    first: Float[Tensor, "*T P 5"],
    second: Float[Tensor, "*T P 5"],
) -> Float[Tensor, "*T P 22"]:
    """The features of each weight but the step's embedding: over the weights, mean 0 and standard deviation 1."""
    root = (second + EPS).rsqrt()
    found = torch.cat([g[..., None], w[..., None], first, second, first * root, root], -1)
    mean = found.mean(-2, keepdim=True)
    found = found - mean
    # Of a feature that is the same for all weights the rounding of the mean is left, no deviation to divide by. Centred
    # again it is some eps² of the mean; where one weight differs by a digit, the deviation is at least eps/√P of it.
    found = found - found.mean(-2, keepdim=True)
    least = 1e-20 + (1e-4 * torch.finfo(found.dtype).eps * mean).square()
    return found * (found.square().mean(-2, keepdim=True) + least).rsqrt()


def embedding(step: Float[Tensor, "*T"]) -> Float[Tensor, "*T 9"]:
    """tanh(step / scale) for nine scales."""
    return torch.tanh(step[..., None] / torch.tensor(SCALES, dtype=step.dtype, device=step.device))


def _network(found: Float[Tensor, "*T P 22"], at: Float[Tensor, "*T 9"], meta: Meta) -> Float[Tensor, "*T P 2"]:
    # The embedding is the same for all weights: one row of numbers rather than nine columns.
    shared = at @ meta["W1"][NORMALISED:] + meta["b1"]
    return torch.relu(found @ meta["W1"][:NORMALISED] + shared[..., None, :]) @ meta["W2"] + meta["b2"]


def _flat(tree: Tree, axes: int) -> Float[Tensor, "*T P"]:
    """All weights in a row, in float32 at least: in half precision the averages and their roots would be lost."""
    leaves = [leaf.reshape(*leaf.shape[:axes], -1) for leaf in pytree.tree_leaves(tree)]
    return torch.cat([leaf.to(torch.promote_types(leaf.dtype, torch.float32)) for leaf in leaves], -1)


def _shaped(flat: Float[Tensor, "*T P"], like: Tree, axes: int) -> Tree:
    leaves, shape = pytree.tree_flatten(like)
    parts = flat.split([leaf.shape[axes:].numel() for leaf in leaves], -1)
    parts = [part.reshape(leaf.shape).to(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
    return pytree.tree_unflatten(parts, shape)


class MLPOptimizer(Optimizer):
    """A learned optimizer in the place of any other: the same loop, no learning rate.

    Args:
        params: parameters, or parameter groups; features are normalised over those that have gradients.
        meta: its weights, as `learn` returns them.
        size: multiplies the update; 1 is what was learned.

    >>> model = torch.nn.Linear(3, 2)
    >>> opt = MLPOptimizer(model.parameters(), mlp_parameters())
    >>> model(torch.ones(1, 3)).sum().backward()
    >>> opt.step()
    """

    def __init__(self, params: Iterable[Any], meta: Meta, size: float = 1.0) -> None:
        if not isinstance(meta, Mapping) or not all(isinstance(p, Tensor) for p in meta.values()):
            given = f"meta of type {type(meta).__name__}"
            raise InputError(describe(given, "a dictionary of tensors", "pass what mlp_parameters or learn made"))
        hidden = meta["W2"].shape[0] if "W2" in meta and meta["W2"].ndim else 1
        wanted = {name: tuple(p.shape) for name, p in mlp_parameters(hidden).items()}
        given = {name: tuple(p.shape) for name, p in meta.items()}
        if given != wanted:
            raise InputError(describe(f"meta of shapes {given}", f"{wanted}", "pass what mlp_parameters or learn made"))
        if not all(bool(torch.isfinite(p).all()) for p in meta.values()):
            raise InputError(describe("meta that is not finite", "finite weights", "learn them again"))
        if not 0 < size < math.inf:
            raise InputError(describe(f"size={size}", "a finite number > 0", "pass e.g. size=1.0"))
        super().__init__(params, {"size": size})
        self.meta = {name: p.detach().clone() for name, p in meta.items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = [(p, group["size"]) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not found:
            return loss
        params = [p for p, _ in found]
        gradients = []
        for p in params:
            assert p.grad is not None, "chosen by that"
            if p.grad.is_sparse:
                raise UnsupportedError(describe("a sparse gradient", "dense ones", "make the embedding dense"))
            gradients.append(p.grad)
            if not self.state[p]:
                self.state[p].update(mlp_memory([p]))
        memory = {name: torch.cat([self.state[p][name] for p in params]) for name in ("first", "second")} | {
            # One count for all: a parameter may get its first gradient late.
            "step": torch.stack([state["step"] for state in self.state.values()]).max()
        }
        meta = {name: value.to(memory["first"]) for name, value in self.meta.items()}
        changes, memory = mlp_update(gradients, memory, params, meta)
        sizes = [p.numel() for p in params]
        parts = [memory[name].split(sizes) for name in ("first", "second")]
        for (p, size), change, first, second in zip(found, changes, *parts, strict=True):
            p.add_(change, alpha=size)
            self.state[p].update(first=first.clone(), second=second.clone(), step=memory["step"].clone())
        return loss
