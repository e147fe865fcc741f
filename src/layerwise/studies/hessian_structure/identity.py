"""The Hessian in one layer's weights against double differentiation of the loss, and across layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from layerwise import structure
from layerwise.foundations.errors import InputError
from layerwise.foundations.random import stream
from layerwise.studies.hessian_structure.networks import Task

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


class Identity(NamedTuple):
    """Relative Frobenius distances."""

    within: float
    """Between E[M ⊗ xxᵀ] and the Hessian in a layer's weights, the largest over layers."""
    across: float
    """Between the Gauss–Newton matrix and the Hessian in all weights of the network."""
    refused: bool
    """Whether `lw.structure.layer_hessian` asked for a choice between the two matrices in some layer."""


def network(sizes: Sequence[int], activation: str, seed: int) -> nn.Sequential:
    """Xavier's normal weights, and biases that are not zero, so that nothing vanishes by chance."""
    generator, parts = stream(seed, "identity"), []
    for fan_in, fan_out in pairwise(sizes):
        layer = nn.Linear(fan_in, fan_out, dtype=torch.float64)
        nn.init.xavier_normal_(layer.weight, generator=generator)
        nn.init.normal_(layer.bias, std=0.1, generator=generator)
        parts += [layer, ACTIVATIONS[activation]()]
    return nn.Sequential(*parts[:-1])


def identity(sizes: Sequence[int], activation: str, examples: int, seed: int) -> Identity:
    """Compare on the first digits; `sizes` begin with 64 inputs and end with 10 classes."""
    split = Task(trained_on=examples).split()
    model = network(sizes, activation, seed)
    exact, gauss_newton = dense(model, split.x, split.y)
    places, start = {}, 0
    for name, p in model.named_parameters():
        places[name] = slice(start, start + p.numel())
        start += p.numel()
    worst, refused = 0.0, False
    for name in (str(k) for k, part in enumerate(model) if isinstance(part, nn.Linear)):
        block = exact[places[f"{name}.weight"], places[f"{name}.weight"]]
        try:
            ours = structure.layer_hessian(model, (split.x, split.y), name).dense()
        except InputError:
            refused = True
            ours = structure.layer_hessian(model, (split.x, split.y), name, gauss_newton=True).dense()
        worst = max(worst, _distance(ours, block))
    return Identity(worst, _distance(gauss_newton, exact), refused)


def dense(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The Hessian and the Gauss–Newton matrix of the mean loss in all parameters, by autograd alone."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    flat = torch.cat([p.detach().flatten() for p in model.parameters()]).requires_grad_()

    def logits(w: Tensor) -> Tensor:
        pieces = w.split([shape.numel() for shape in shapes.values()])
        named = {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
        return functional_call(model, named, (x,))

    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(logits(flat), y), flat, create_graph=True)
    eye = torch.eye(len(flat), dtype=flat.dtype)
    (exact,) = torch.autograd.grad(gradient, flat, eye, is_grads_batched=True)
    f = logits(flat)
    basis = torch.eye(f.numel(), dtype=flat.dtype).view(-1, *f.shape)
    (jacobian,) = torch.autograd.grad(f, flat, basis, is_grads_batched=True)
    J, p = jacobian.view(*f.shape, -1), f.detach().softmax(1)
    A = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    return exact, torch.einsum("nip,nij,njq->pq", J, A, J) / len(x)


def _distance(ours: Tensor, exact: Tensor) -> float:
    return float((ours - exact).norm() / exact.norm())
