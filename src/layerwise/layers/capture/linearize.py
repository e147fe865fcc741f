"""``J v`` and ``Jᵀ u`` of a model on a batch, by autodiff and without forming J.

``J v`` is tried in forward mode, then by two backward passes; for every new graph of operations a way is checked with
``⟨u, J v⟩ = ⟨Jᵀ u, v⟩`` for random u and v, since not every operation has a right forward-mode (or second) derivative.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from layerwise.foundations.errors import NumericalError, describe
from layerwise.foundations.random import stream
from layerwise.foundations.types import HALF, Tree, trainable
from layerwise.layers.capture.graph import Graph
from layerwise.layers.capture.model_call import call, substituted
from layerwise.layers.capture.vectorised import batched_grad, tolerance


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Fused attention and cuDNN's recurrent kernels have no second derivative; these have."""
    with sdpa_kernel([SDPBackend.MATH]), torch.backends.cudnn.flags(enabled=False):
        yield


def forward(model: nn.Module, params: Mapping[str, Tensor], x: Tree) -> Tensor:
    """The model's output as a function of some of its parameters."""
    with substituted(model, params):
        return call(model, x)


WAYS = ("forward", "double")


def _forgets_padding(graph: Graph) -> bool:
    """Whether forward mode is wrong: in torch 2.13 it moves the padding token of an embedding, which has no gradient.

    It would not show where a batch has no padding, so that no check of one batch can tell.
    """
    tables = (node for node in graph.nodes if type(node).__name__.startswith("EmbeddingBackward"))
    return any(node._saved_padding_idx < 2**63 for node in tables)  # no padding is −1, shown as 2⁶⁴ − 1


class Linearization:
    """The derivative of one model; remembers which way to ``J v`` works."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.model = model
        self.params: dict[str, nn.Parameter] = {k: p for k, p in trainable(model).items() if k in names}
        self._checked: dict[object, str] = {}
        """The way that is right, by graph and sizes."""

    def run(self, x: Tree) -> Tensor:
        """The output, with its graph."""
        with torch.enable_grad(), twice_differentiable():
            return forward(self.model, self.params, x)

    def pull(self, f: Tensor, u: Tensor, retain_graph: bool = False) -> dict[str, Tensor]:
        """``Jᵀ u`` for columns ``u [B, *f]``."""
        if not f.requires_grad:  # no parameter takes part in this batch
            return {k: p.new_zeros(u.shape[0], *p.shape) for k, p in self.params.items()}
        grads = batched_grad(f, list(self.params.values()), u.to(f.dtype), retain_graph)
        return {
            k: p.new_zeros(u.shape[0], *p.shape) if g is None else g
            for (k, p), g in zip(self.params.items(), grads, strict=True)
        }

    def push(self, x: Tree, f: Tensor, v: Mapping[str, Tensor], arrange: Callable[[Tensor], Tensor]) -> Tensor:
        """``J v`` for columns ``v {parameter: [B, *shape]}``: ``[B, *f]``."""
        if not f.requires_grad:
            return f.new_zeros(len(next(iter(v.values()))), *f.shape)
        reason = "they do not agree with the gradient"
        graph = Graph.of(f)
        key = graph.key({}), f.shape, f.dtype
        known = self._checked.get(key)
        if known is not None:
            return getattr(self, f"_{known}")(x, f, v, arrange)
        for way in WAYS[_forgets_padding(graph) :]:
            pushed = getattr(self, f"_{way}")
            try:
                if self._is_right(lambda w, pushed=pushed: pushed(x, f, w, arrange), f, graph):
                    self._checked[key] = way
                    return pushed(x, f, v, arrange)
            except (RuntimeError, NotImplementedError) as error:
                reason = str(error).splitlines()[0]
        raise NumericalError(
            describe(
                f"a model without a usable forward-mode or second derivative ({reason})",
                "operations with a right forward-mode or second derivative",
                'use structure="lowrank" or "dense", which need first derivatives only',
            )
        )

    def _forward(self, x: Tree, f: Tensor, v: Mapping[str, Tensor], arrange: Callable[[Tensor], Tensor]) -> Tensor:
        primal = {k: p.detach() for k, p in self.params.items()}
        columns = []
        with warnings.catch_warnings(), twice_differentiable():
            warnings.simplefilter("ignore")
            for b in range(next(iter(v.values())).shape[0]):
                tangent = {k: v[k][b].to(p.dtype) for k, p in primal.items()}
                columns.append(jvp(lambda p: arrange(forward(self.model, p, x)), (primal,), (tangent,))[1])
        return torch.stack(columns).detach()

    def _double(self, x: Tree, f: Tensor, v: Mapping[str, Tensor], arrange: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.enable_grad(), twice_differentiable():
            u = torch.zeros_like(f, requires_grad=True)
            pulled = torch.autograd.grad(f, list(self.params.values()), u, create_graph=True, allow_unused=True)
            kept = [(g, v[k]) for (k, _), g in zip(self.params.items(), pulled, strict=True) if g is not None]
            columns = []
            for b in range(next(iter(v.values())).shape[0]):
                total = sum((g * t[b].to(g.dtype)).sum() for g, t in kept)
                columns.append(torch.autograd.grad(total, u, retain_graph=True)[0])  # type: ignore[arg-type]
        return torch.stack(columns).detach()

    def _is_right(self, push: Callable[[Mapping[str, Tensor]], Tensor], f: Tensor, graph: Graph) -> bool:
        """By random vectors: the caller's may be zero where a derivative is wrong.

        The error of ``J w`` is ``e |J w|`` in a direction that is not known, of which a random cotangent u sees
        ``|u| / √m`` of its size, m being the number of outputs. So e is the root mean square over some u. In half
        precision more of them are needed, or an error of a third passes for rounding.
        """
        half = not graph.dtypes.isdisjoint(HALF)
        tangents, cotangents = (3, 8) if half else (1, 2)
        w = {
            k: torch.randn(tangents, *p.shape, generator=stream(0, "tangent", k)).to(p) for k, p in self.params.items()
        }
        devices = sorted({p.device.index or 0 for p in self.params.values() if p.device.type == "cuda"})
        with torch.random.fork_rng(devices=devices):  # what follows must draw the same
            pushed = push(w).double()
        generator, errors = stream(0, "adjoint"), []
        for _ in range(cotangents):  # one after another: together they would be as many gradients
            u = torch.randn(f.shape, generator=generator).to(f)
            back = self.pull(f, u.unsqueeze(0), retain_graph=True)
            by_push = torch.tensordot(pushed, u.double(), u.ndim)
            errors.append(by_push - sum(_products(back[k], w[k]).to(f.device) for k in self.params))
        error = torch.stack(errors).square().mean(0).sqrt()
        coarsest = torch.float32 if torch.float32 in graph.dtypes else f.dtype
        limit = 0.1 if half else tolerance(coarsest, f.device)
        return bool((error <= limit * pushed.flatten(1).norm(dim=1) + 1e-30).all())


def _products(g: Tensor, w: Tensor) -> Tensor:
    """Of one gradient with each tangent, in float64 and without a copy of them."""
    return torch.stack([(g[0] * each).sum(dtype=torch.float64) for each in w])
