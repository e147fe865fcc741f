"""Parameters that no rule covers: per-example gradients by autodiff, by the first way that works.

1. `vmap` of a vector-Jacobian product over examples;
2. a loop over examples, each run alone (LSTM and others that `vmap` cannot trace);
3. a loop over examples on the batch's own graph, where examples cannot be run alone or the forward is random.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import vjp, vmap

from layerwise.foundations.types import Tree, leaves, map_leaves
from layerwise.layers.calling import call, example_count, holding, substituted, take
from layerwise.layers.vectorised import batched_grad, mixture_of

Arrange = Callable[[Tensor], Tensor]
"""Raw output to standard form ``[N, S, C]``."""


def is_random(model: nn.Module) -> bool:
    """Whether the forward draws random numbers: then only the batch's own graph gives its gradients."""
    rates = (getattr(m, name, 0.0) for m in model.modules() if m.training for name in ("p", "dropout"))
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)


WAYS = ("vmap", "loop", "graph")


class ExampleGradients:
    """Per-example gradients of some parameters; remembers which way worked.

    The first answer of each way is checked: summed over examples it must be the gradient that plain autograd
    gives for the batch (`vmap` is silently wrong for some operations, among them PReLU in torch 2.13).
    """

    def __init__(self, model: nn.Module, names: list[str], example_axis: int, shared: Collection[int] = ()) -> None:
        self.model, self.names, self.axis, self.shared = model, names, example_axis, shared
        self.params: dict[str, nn.Parameter] = {}
        self.way = "vmap"
        if names:
            self.params = {k: p for k, p in model.named_parameters() if k in names}
            self.way = "graph" if is_random(model) else "vmap"
        self._checked: set[bool] = set()
        """Whether of several cotangents, whether of one: a rule may be right for one alone."""

    def rows(
        self, x: Tree, f: Float[Tensor, "N S C"], v: Float[Tensor, "V N S C"], arrange: Arrange
    ) -> dict[str, Float[Tensor, "V N ..."]]:
        """``{parameter: [V, N, *shape]}``: gradient of ``v[·, n] · f(x_n)`` for every example n."""
        several = v.shape[0] > 1
        for way in WAYS[WAYS.index(self.way) :]:
            try:
                rows = getattr(self, f"_{way}")(x, f, v, arrange)
            except (RuntimeError, ValueError, NotImplementedError, TypeError, IndexError):
                if way == "graph":
                    raise
                continue
            if (way == self.way and several in self._checked) or way == "graph" or self._adds_up(rows, f, v):
                self._checked = self._checked | {several} if way == self.way else {several}
                self.way = way
                return rows
        raise AssertionError("unreachable")

    def _adds_up(self, rows: Mapping[str, Tensor], f: Tensor, v: Tensor) -> bool:
        """By a mixture of all cotangents: rules may be right for the first alone."""
        mixture = mixture_of(v)
        truth = self._pull(f, torch.tensordot(mixture, v, 1).unsqueeze(0), retain_graph=True)
        gap = sum(
            float((torch.tensordot(mixture.to(t.dtype), rows[k].sum(1), 1) - t[0]).double().square().sum())
            for k, t in zip(self.params, truth, strict=True)
        )
        scale = sum(float(t.double().square().sum()) for t in truth)
        tolerance = {torch.float64: 1e-6, torch.float32: 1e-2}.get(f.dtype, 0.2)
        return gap <= tolerance**2 * scale or (scale == 0 and gap == 0)

    def _forward(self, params: Mapping[str, Tensor], x: Tree, arrange: Arrange) -> Tensor:
        with substituted(self.model, params):
            return arrange(call(self.model, x))

    def _vmap(self, x: Tree, f: Tensor, v: Tensor, arrange: Arrange) -> dict[str, Tensor]:
        if example_count(x, self.axis) != f.shape[0]:
            raise ValueError("examples cannot be run alone")
        flat = list(leaves(x))
        in_axes = [self.axis if held else None for held in holding(x, self.axis, self.shared)]
        params = {name: p.detach() for name, p in self.params.items()}

        def one(v_n: Tensor, *tensors: Tensor) -> dict[str, Tensor]:
            alone = iter(
                t.unsqueeze(self.axis) if where is not None else t for t, where in zip(tensors, in_axes, strict=True)
            )
            x_n = _rebuild(x, alone)
            pull = vjp(lambda p: self._forward(p, x_n, arrange)[0], params)[1]
            return vmap(lambda u: pull(u)[0])(v_n)

        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            rows = vmap(one, in_dims=(1, *in_axes), out_dims=1)(v, *flat)
        return {name: rows[name].detach() for name in self.names}

    def _loop(self, x: Tree, f: Tensor, v: Tensor, arrange: Arrange) -> dict[str, Tensor]:
        if example_count(x, self.axis) != f.shape[0]:
            raise ValueError("examples cannot be run alone")
        columns = []
        for n in range(f.shape[0]):
            with torch.enable_grad():
                f_n = self._forward(self.params, take(x, n, n + 1, self.axis, self.shared), arrange)
            columns.append(self._pull(f_n, v[:, n : n + 1], retain_graph=False))
        return {name: torch.stack([c[i] for c in columns], dim=1) for i, name in enumerate(self.params)}

    def _graph(self, x: Tree, f: Tensor, v: Tensor, arrange: Arrange) -> dict[str, Tensor]:
        columns = []
        for n in range(f.shape[0]):
            only = torch.zeros_like(v)
            only[:, n] = v[:, n]
            columns.append(self._pull(f, only, retain_graph=True))
        return {name: torch.stack([c[i] for c in columns], dim=1) for i, name in enumerate(self.params)}

    def _pull(self, f: Tensor, v: Tensor, retain_graph: bool) -> list[Tensor]:
        grads = batched_grad(f, list(self.params.values()), v, retain_graph)
        return [
            p.new_zeros(v.shape[0], *p.shape) if g is None else g
            for g, p in zip(grads, self.params.values(), strict=True)
        ]


def _rebuild(tree: Tree, tensors: Iterator[Tensor]) -> Tree:
    return map_leaves(lambda _: next(tensors), tree)
