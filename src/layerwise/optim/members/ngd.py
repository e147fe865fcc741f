"""Natural gradient with the whole matrix of the batch: dense, by Woodbury's identity, or by conjugate gradients.

With the rows ``R`` of the batch (one a cotangent and example, scaled by ``1/√N``), ``F = RᵀR`` over all layers at
once, cross-layer blocks included. Nothing is run again: ``R v = Σ_l ⟨g_l, V_l a_l⟩`` comes from recorded inputs and
gradients.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from layerwise.distributed.processes import Processes
from layerwise.foundations.errors import InputError, describe, not_one_of
from layerwise.foundations.likelihoods import Likelihood
from layerwise.foundations.linalg import conjugate_gradient, guarded_cholesky
from layerwise.kernel.contraction import contract, rows_of
from layerwise.layers.io.one_hot import OneHot
from layerwise.layers.io.standard import Standard
from layerwise.optim.backend import Backend
from layerwise.optim.engine import Layerwise
from layerwise.optim.options import LIKELIHOOD, LOSS_AVERAGE, Overrides
from layerwise.optim.rule import Context, Recorded, Requirements, Shape, State, UpdateRule
from layerwise.optim.statistics.accumulate import Sums
from layerwise.optim.step.update import Part

METHODS = ("auto", "dense", "woodbury", "cg")
FEW_ROWS = 4096
"""Up to this many rows "auto" takes Woodbury's identity, above conjugate gradients."""


@final
@dataclass
class BatchRows(UpdateRule):
    """Keeps the batch; the direction is made for all layers together."""

    name = "ngd"
    formula = "(F + λI)⁻¹ ∇L, F of the batch over all layers"

    def requirements(self, shape: Shape | None = None) -> Requirements:
        """The batch's inputs and output gradients, example by example, of any layer."""
        return Requirements(inputs=True, outgrads=True, examples=True, kronecker_only=False, moments=False)

    def init(self, shape: Shape, backend: Backend) -> State:
        """Nothing."""
        return {}

    def direction(self, state: State, grad: Float[Tensor, "K O I"], context: Context) -> Float[Tensor, "K O I"]:
        """As it is: `NGD` has solved for all layers already."""
        return grad


@dataclass
class JacobianRows:
    """``R``, never formed: what was recorded of each layer, one block a forward and cotangent.

    A layer that some forwards did not call has zeros in their rows.
    """

    layers: dict[str, list[Recorded]]
    examples: int
    processes: Processes = field(default_factory=Processes)
    """Rows are those of all of them; each holds its own."""

    @cached_property
    def blocks(self) -> dict[tuple[int, int], int]:
        """How many rows each forward and cotangent has."""
        found = {call.batch: call.io.vectors * call.io.examples for calls in self.layers.values() for call in calls}
        return dict(sorted(found.items()))

    @property
    def count(self) -> int:
        """Rows in all."""
        return sum(self.blocks.values())

    def push(self, V: dict[str, Tensor]) -> Float[Tensor, "rows"]:
        """``R v`` for one matrix a layer."""
        total = self._zeros(V, self.count)
        for name, calls in self.layers.items():
            for call in calls:
                total[self._rows(call)] += _push(call.io.standard(), V[name]) * call.factor
        return total / self.examples**0.5

    def pull(self, u: Float[Tensor, "rows"]) -> dict[str, Tensor]:
        """``Rᵀ u``."""
        found = {
            name: sum(_pull(call.io.standard(), u[self._rows(call)]) * call.factor for call in calls)
            for name, calls in self.layers.items()
        }
        totals = self.processes.add_up([t / self.examples**0.5 for t in found.values()])  # type: ignore[operator]
        return dict(zip(found, totals, strict=True))

    def gram(self, like: Tensor) -> Float[Tensor, "rows rows"]:
        """``R Rᵀ``, layer by layer, by the cheaper of Gram products and per-example gradients."""
        total = like.new_zeros(self.count, self.count)
        for calls in self.layers.values():
            chunks = [(call.io.standard(), call.factor, self._rows(call)) for call in calls]
            for a, s, rows in chunks:
                for b, t, columns in chunks:
                    total[rows, columns] += _gram(a, b) * (s * t)
        return total / self.examples

    def dense(self, sizes: dict[str, int], like: Tensor) -> Float[Tensor, "rows D"]:
        """``R`` itself, layers side by side."""
        blocks = []
        for name, calls in self.layers.items():
            block = like.new_zeros(self.count, sizes[name])
            for call in calls:
                block[self._rows(call)] = rows_of(call.io.standard()).transpose(0, 1).flatten(0, 1) * call.factor
            blocks.append(block)
        return torch.cat(blocks, dim=1) / self.examples**0.5

    def _rows(self, call: Recorded) -> slice:
        start = sum(size for batch, size in self.blocks.items() if batch < call.batch)
        return slice(start, start + self.blocks[call.batch])

    @staticmethod
    def _zeros(V: dict[str, Tensor], size: int) -> Tensor:
        return next(iter(V.values())).new_zeros(size)


def _examples(sums: Sums) -> dict[int, int]:
    """Examples of each forward that called a layer."""
    return {call.batch[0]: call.io.examples for call in sums.recorded}


def _push(chunk: Standard, V: Float[Tensor, "K O I"]) -> Float[Tensor, "rows"]:
    if isinstance(chunk.a, OneHot):
        table = torch.nn.functional.pad(V[0].mT, (0, 0, 1, 0))
        y = table[chunk.a.index.reshape(chunk.a.index.shape[0], -1) + 1].unsqueeze(2)
    else:
        y = torch.einsum("nski,koi->nsko", chunk.a, V)
    return torch.einsum("vnsko,nsko->vn", chunk.g, y).flatten()


def _pull(chunk: Standard, u: Float[Tensor, "rows"]) -> Float[Tensor, "K O I"]:
    v, n = chunk.g.shape[:2]
    weighted = torch.einsum("vnsko,vn->nsko", chunk.g, u.view(v, n))
    return Standard(chunk.a, weighted.unsqueeze(0)).grad()[0]


def _gram(left: Standard, right: Standard) -> Float[Tensor, "rows rows2"]:
    _, _, s, _, o = left.g.shape
    i = left.a.shape[-1]
    order = "gram" if s * s * (i + o) <= 4 * o * i or isinstance(left.a, OneHot) else "rows"
    block = contract(order, left, right)  # N, V, M, W
    return block.permute(1, 0, 3, 2).reshape(block.shape[0] * block.shape[1], -1)


class NGD(Layerwise):
    """Natural gradient: ``θ ← θ − η (F + λ I)⁻¹ ∇L`` with the whole matrix F of the batch, all layers together.

    Parameters of layers without a rule get the fallback's update.

    Args:
        model: the module that is trained.
        lr: η.
        damping: λ, relative to ``tr F / min(N, D)`` of N examples and D parameters (most eigenvalues of F are zero,
            and do not count) unless ``damping_scale="absolute"``.
        momentum: of the direction.
        weight_decay: decoupled.
        method: "dense" (small models), "woodbury" (a system as large as the batch's rows), "cg", or "auto".
        tol: relative residual at which "cg" stops.
        max_iterations: of "cg".
        clip: bound on the step's predicted change ``η²⟨D, ∇L⟩``; None for the bare formula.
        likelihood: that of the model's output, for labels drawn from it; see `Layerwise`.
        loss_average: how the loss in your loop is reduced: over "examples", over "tokens", or None for a sum.
        overrides: options for layers or parameters by pattern, ``{"*.bias": {"weight_decay": 0.0}}``.
        options: all others of `Layerwise`.

    Reference: Amari 1998.

    >>> import torch, layerwise as lw
    >>> opt = lw.optim.NGD(torch.nn.Linear(4, 3), lr=0.1, likelihood="categorical", estimator="exact")
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-1,
        damping: Any = 1e-2,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        clip: float | tuple[str, float] | None = 1e-3,
        method: str = "auto",
        tol: float = 1e-8,
        max_iterations: int = 250,
        likelihood: str | Likelihood | None = LIKELIHOOD,
        loss_average: str | None = LOSS_AVERAGE,
        overrides: Overrides | None = None,
        **options: Any,
    ) -> None:
        if method not in METHODS:
            raise InputError(not_one_of("method", method, METHODS))
        if options.get("factor_every", 1) != 1:
            raise InputError(describe("factor_every above 1", "1: the matrix is that of each batch", "leave it out"))
        self.method, self.tol, self.max_iterations = method, tol, max_iterations
        super().__init__(
            model,
            rule=BatchRows(),
            lr=lr,
            damping=damping,
            momentum=momentum,
            weight_decay=weight_decay,
            clip=clip,
            likelihood=likelihood,
            loss_average=loss_average,
            overrides=overrides,
            **options,
        )

    def _solve_together(self, parts: list[Part], seen: dict[str, Sums]) -> None:
        mine = [part for part in parts if part.stack.rule is self.rule]
        known = {name: sums for name, sums in seen.items() if sums.recorded}
        if mine and known:
            grads: dict[str, Tensor] = {}
            for part in mine:
                for spec, groups in part.stack.layers:
                    if spec.name in known:
                        grads[spec.name] = part.grad[groups]
            answer = self._solve(grads, known)
            for part in mine:
                grad: Tensor = part.grad
                pieces = [answer.get(spec.name, grad[groups]) for spec, groups in part.stack.layers]
                part.handed = torch.cat(pieces)

    def _solve(self, grads: dict[str, Tensor], known: dict[str, Sums]) -> dict[str, Tensor]:
        counted = {batch: n for sums in known.values() for batch, n in _examples(sums).items()}
        here = next(iter(grads.values()))
        total = torch.tensor(float(sum(counted.values())), dtype=torch.float64, device=here.device)
        examples = int(self.processes.add_up([total])[0])
        R = JacobianRows({name: known[name].recorded for name in grads}, examples, self.processes)
        rows = R.count
        size = sum(g.numel() for g in grads.values())
        method = self.method
        if self.processes.count > 1:
            method = "cg"  # each process holds its own rows: only products are cheap
        elif method == "auto":
            method = "woodbury" if rows <= FEW_ROWS else "cg"
        group = self.param_groups[0]
        damping = self._damping.at(group, self.steps_taken)
        size = min(size, examples)  # of D eigenvalues, most are zero where there are fewer examples
        if method == "woodbury":
            return self._woodbury(R, grads, damping, size)
        if method == "dense":
            return self._dense(R, grads, damping, size)
        return self._iterated(R, grads, damping, size)

    def _lambda(self, trace: Tensor, damping: float, size: int) -> float:
        mean = float(trace) / size
        return max(damping * mean, torch.finfo(trace.dtype).tiny) if self._damping.relative else damping

    def _woodbury(self, R: JacobianRows, grads: dict[str, Tensor], damping: float, size: int) -> dict[str, Tensor]:
        """``(∇L − Rᵀ (R Rᵀ + λ I)⁻¹ R ∇L) / λ``."""
        K = R.gram(next(iter(grads.values())))
        lam = self._lambda(K.trace(), damping, size)
        root = guarded_cholesky(K, name="Gram matrix of the batch", damping=lam)
        inner = R.push(grads).to(root.dtype)
        pulled = R.pull(torch.cholesky_solve(inner.unsqueeze(1), root)[:, 0].to(K.dtype))
        return {name: (g - pulled[name]) / lam for name, g in grads.items()}

    def _dense(self, R: JacobianRows, grads: dict[str, Tensor], damping: float, size: int) -> dict[str, Tensor]:
        """Cholesky of ``F + λ I``."""
        flat = R.dense({name: g.numel() for name, g in grads.items()}, next(iter(grads.values())))
        F = flat.mT @ flat
        root = guarded_cholesky(F, name="Fisher matrix of the batch", damping=self._lambda(F.trace(), damping, size))
        g = torch.cat([t.flatten() for t in grads.values()]).to(root.dtype)
        x = torch.cholesky_solve(g.unsqueeze(1), root)[:, 0].to(F.dtype)
        pieces = x.split([t.numel() for t in grads.values()])
        return {name: piece.view_as(t) for (name, t), piece in zip(grads.items(), pieces, strict=True)}

    def _iterated(self, R: JacobianRows, grads: dict[str, Tensor], damping: float, size: int) -> dict[str, Tensor]:
        """Conjugate gradients on ``F + λ I``."""
        sizes = [t.numel() for t in grads.values()]
        trace = sum(
            (call.io.standard().squared_norms() * call.factor**2).sum() for calls in R.layers.values() for call in calls
        )
        assert isinstance(trace, Tensor)
        lam = self._lambda(self.processes.add_up([trace / R.examples])[0], damping, size)

        def product(X: Tensor) -> Tensor:
            cut = {n: p.view_as(t) for (n, t), p in zip(grads.items(), X[:, 0].split(sizes), strict=True)}
            F_X = R.pull(R.push(cut))
            return torch.cat([F_X[name].flatten() for name in grads]).unsqueeze(1) + lam * X

        g = torch.cat([t.flatten() for t in grads.values()]).unsqueeze(1)
        found = conjugate_gradient(product, g, tol=self.tol, max_iterations=self.max_iterations)
        if not found.converged:
            self._health.fallbacks += 1
        pieces = found.solution[:, 0].split(sizes)
        return {name: piece.view_as(t) for (name, t), piece in zip(grads.items(), pieces, strict=True)}
