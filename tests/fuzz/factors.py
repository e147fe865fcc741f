"""Kronecker factors of plain linear layers by their formula, from hooks of our own.

A layer counts as plain if it is an `nn.Linear` with one call a batch that reaches the loss, and if the gradients of
single examples are made of that call alone: Σ_s g_ns a_nsᵀ must be the oracle's own. Of all other layers only sanity
is asked.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from cases import Batch, outputs, trainable
from oracle import Truth, jacobian_rows
from torch import Tensor, nn


@dataclass
class Moments:
    """Sums over one batch; `positions` is N·S."""

    A: Tensor
    G: Tensor
    positions: int
    examples: int
    size: float
    """Of G with an output Fisher of 1: beside it, what is left of a saturated softmax may be rounding alone."""


def moments_of(model: nn.Module, batch: Batch, truth: Truth, estimator: str) -> dict[str, Moments]:
    """Of every plain linear layer, by its name."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
    handles = [
        module.register_forward_hook(lambda m, args, out, name=name: seen.setdefault(name, []).append((args[0], out)))
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module.weight.requires_grad
    ]
    try:
        f = outputs(model, batch.x)
    finally:
        for handle in handles:
            handle.remove()
    live = {}
    for name, calls in seen.items():
        reaching = [(a, out) for a, out in calls if out.requires_grad and _reaches(f, out)]
        if len(reaching) == 1 and reaching[0][0].ndim >= 2 and reaching[0][0].shape[0] == batch.n:
            live[name] = reaching[0]
    found = {}
    rows = jacobian_rows(f, [out for _, out in live.values()])
    for (name, (a, _)), Jz in zip(live.items(), rows, strict=True):
        moments = _moments(model, name, a, Jz, truth, estimator)
        if moments is not None:
            found[name] = moments
    return found


def _reaches(f: Tensor, out: Tensor) -> bool:
    return torch.autograd.grad(f.sum(), out, retain_graph=True, allow_unused=True)[0] is not None


def _moments(model: nn.Module, name: str, a: Tensor, Jz: Tensor, truth: Truth, estimator: str) -> Moments | None:
    """`Jz` is the gradient of every entry of the model's output to the layer's: ``[entries, *output]``."""
    module = model.get_submodule(name)
    n = a.shape[0]
    rows = a.detach().double().reshape(n, -1, a.shape[-1])
    Jz = Jz.double().reshape(n, -1, n, rows.shape[1], Jz.shape[-1])  # [N, S·C, n, s, O]
    own = torch.stack([Jz[i, :, i] for i in range(n)])
    if not torch.allclose(own.square().sum(), Jz.square().sum(), rtol=1e-10):
        return None  # the first axis does not hold the examples
    biased = module.bias is not None and module.bias.requires_grad
    rows = F.pad(rows, (0, 1), value=1.0) if biased else rows
    made = torch.einsum("npso,nsi->npoi", own, rows)
    if not torch.allclose(made, _oracle(model, module, truth, biased), rtol=1e-8, atol=1e-10):
        return None
    if estimator == "exact":
        H = truth.output_fisher()
        whole = torch.stack([torch.block_diag(*H_n) for H_n in H])
        G = torch.einsum("npso,npq,nqsr->or", own, whole, own)
    else:
        g = torch.einsum("npso,np->nso", own, truth.slopes().flatten(1))
        G = torch.einsum("nso,nsr->or", g, g)
    size = float(own.square().sum())
    return Moments(torch.einsum("nsi,nsj->ij", rows, rows), G, n * rows.shape[1], n, size)


def _oracle(model: nn.Module, module: nn.Module, truth: Truth, biased: bool) -> Tensor:
    """``[N, S·C, O, I]``: the layer's columns of the oracle's Jacobian."""
    start, pieces = 0, {}
    J = truth.J.flatten(1, 2)
    for _, p in trainable(model):
        pieces[id(p)] = J[..., start : start + p.numel()].unflatten(-1, p.shape or (1,))
        start += p.numel()
    weight = pieces[id(module.weight)]
    return torch.cat([weight, pieces[id(module.bias)].unsqueeze(-1)], -1) if biased else weight


def joined(parts: list[dict[str, Moments]]) -> dict[str, tuple[Tensor, Tensor, float]]:
    """``{layer: (A, G, size of G)}`` over batches: A = Σ a aᵀ / (N S) and G = Σ g gᵀ / N.

    Of layers that are plain in all of them.
    """
    found = {}
    for name in set.intersection(*(set(part) for part in parts)):
        of = [part[name] for part in parts]
        A = sum(m.A for m in of) / sum(m.positions for m in of)  # type: ignore[operator]
        N = sum(m.examples for m in of)
        found[name] = (A, sum(m.G for m in of) / N, sum(m.size for m in of) / N)  # type: ignore[operator]
    return found
