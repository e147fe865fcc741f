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
from layerwise.layers.capture.model_call import call, example_count, holding, substituted, take
from layerwise.layers.capture.vectorised import batched_grad, mixture_of, tolerance

Arrange = Callable[[Tensor], Tensor]
"""Raw output to standard form ``[N, S, C]``."""


def is_random(model: nn.Module) -> bool:
    """Whether the forward draws random numbers: then only the batch's own graph gives its gradients."""
    rates = (getattr(m, name, 0.0) for m in model.modules() if m.training for name in ("p", "dropout"))
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)


WAYS = ("vmap", "loop", "graph")
MIXTURES = 2
"""Random sums of cotangents and examples that an answer is checked by: one may happen to hide an error."""


class ExampleGradients:
    """Per-example gradients of some parameters; remembers which way worked.

    Every answer is checked: each example alone has the output that it has in the batch, and summed over examples the
    gradient is the one that plain autograd gives (`vmap` is silently wrong for some operations, among them PReLU in
    torch 2.13). That costs one backward, beside one for each example.
    """

    def __init__(self, model: nn.Module, names: list[str], example_axis: int, shared: Collection[int] = ()) -> None:
        self.model, self.names, self.axis, self.shared = model, names, example_axis, shared
        self.params: dict[str, nn.Parameter] = {}
        self.way = "vmap"
        if names:
            self.params = {k: p for k, p in model.named_parameters() if k in names}
            self.way = "graph" if is_random(model) else "vmap"

    def rows(
        self, x: Tree, f: Float[Tensor, "N S C"], v: Float[Tensor, "V N S C"], arrange: Arrange
    ) -> dict[str, Float[Tensor, "V N ..."]]:
        """``{parameter: [V, N, *shape]}``: gradient of ``v[·, n] · f(x_n)`` for every example n."""
        for way in WAYS[WAYS.index(self.way) :]:
            if way == "graph":
                break
            try:
                rows, alone = getattr(self, f"_{way}")(x, f, v, arrange)
            except Exception:  # a model may do anything with one example, or under vmap
                continue
            if self._adds_up(rows, alone, f, v):
                self.way = way
                return rows
        return self._graph(f, v)

    def _adds_up(self, rows: Mapping[str, Tensor], alone: Tensor, f: Tensor, v: Tensor) -> bool:
        """By a mixture of all cotangents and examples: a rule may be right for the first, or for their sum, alone."""
        least = {torch.float64: 1e-8, torch.float32: 1e-3}.get(f.dtype, 0.1)
        fitting = all(rows[k].shape == (v.shape[0], f.shape[0], *p.shape) for k, p in self.params.items())
        if (
            not fitting
            or alone.shape != f.shape
            or not bool((alone - f.detach()).abs().max() <= least * f.detach().abs().max())
        ):
            return False
        return all(self._mixture_adds_up(mixture_of(v, 2, number), rows, f, v) for number in range(MIXTURES))

    def _mixture_adds_up(
        self, mixture: Float[Tensor, "V N"], rows: Mapping[str, Tensor], f: Tensor, v: Float[Tensor, "V N S C"]
    ) -> bool:
        truth = self._pull(f, torch.einsum("vn,vnsc->nsc", mixture, v).unsqueeze(0), retain_graph=True)
        gaps = [
            (torch.tensordot(mixture.to(t.dtype), rows[k], 2) - t[0]).double().norm()
            for k, t in zip(self.params, truth, strict=True)
        ]
        sizes = torch.stack([t.double().norm() for t in truth])
        own = tolerance(f.dtype, f.device)
        return bool((torch.stack(gaps) <= own * (sizes + 1e-2 * sizes.max())).all())

    def _forward(self, params: Mapping[str, Tensor], x: Tree, arrange: Arrange) -> Tensor:
        with substituted(self.model, params):
            return arrange(call(self.model, x))

    def _vmap(self, x: Tree, f: Tensor, v: Tensor, arrange: Arrange) -> tuple[dict[str, Tensor], Tensor]:
        if example_count(x, self.axis, self.shared) != f.shape[0]:
            raise ValueError("examples cannot be run alone")
        flat = list(leaves(x))
        in_axes = [self.axis if held else None for held in holding(x, self.axis, self.shared)]
        params = {name: p.detach() for name, p in self.params.items()}

        def one(v_n: Tensor, *tensors: Tensor) -> tuple[dict[str, Tensor], Tensor]:
            alone = iter(
                t.unsqueeze(self.axis) if where is not None else t for t, where in zip(tensors, in_axes, strict=True)
            )
            x_n = _rebuild(x, alone)
            f_n, pull = vjp(lambda p: self._forward(p, x_n, arrange)[0], params)  # type: ignore[misc]
            return vmap(lambda u: pull(u)[0])(v_n), f_n

        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            rows, alone = vmap(one, in_dims=(1, *in_axes), out_dims=(1, 0))(v, *flat)
        return {name: rows[name].detach() for name in self.names}, alone.detach()

    def _loop(self, x: Tree, f: Tensor, v: Tensor, arrange: Arrange) -> tuple[dict[str, Tensor], Tensor]:
        if example_count(x, self.axis, self.shared) != f.shape[0]:
            raise ValueError("examples cannot be run alone")
        columns, alone = [], []
        for n in range(f.shape[0]):
            with torch.enable_grad():
                f_n = self._forward(self.params, take(x, n, n + 1, self.axis, self.shared), arrange)
            alone.append(f_n.detach())
            columns.append(self._pull(f_n, v[:, n : n + 1], retain_graph=False))
        rows = {name: torch.stack([c[i] for c in columns], dim=1) for i, name in enumerate(self.params)}
        return rows, torch.cat(alone)

    def _graph(self, f: Tensor, v: Tensor) -> dict[str, Tensor]:
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
