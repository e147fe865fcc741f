"""The posterior N(w, S), S diagonal in some bases of the layers, and one noisy step of Algorithm 4.

All that is optimized is one flat tensor ``[w, ς, ρ]`` with s = exp(2ς) and λ = exp(2ρ); of a stack of posteriors it
has first the w of all, then all ς, then all ρ, so that each of the three lies in memory without gaps. The gradient of
the second term of the objective, ``√(B_RE/2)``, is written down instead of differentiated; that of the first comes from
one forward and one backward pass at ``w' = w + ToStandard(ξ ⊙ exp ς)``, ξ drawn for all parameters at once:
``∇_w = ∇_w'`` and ``∇_ς = ToHessian(∇_w') ⊙ ξ ⊙ exp ς``. So a step costs, beside that pass, four matrix products a
layer.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import vmap

from layerwise.bounds.kl import kl_inverse
from layerwise.bounds.pac_bayes.bases import Bases, pieces
from layerwise.bounds.pac_bayes.examples import outputs
from layerwise.bounds.pac_bayes.prior import PriorGrid, divergence, relative_entropy_rate
from layerwise.foundations.types import Tree

START = -3.0
"""ρ at the beginning."""
SMALLEST = 1e-4
"""Of a standard deviation |w| at the beginning, relative to the root mean square of all: a weight of zero has none."""
ROUNDS = 100
"""In which variance, λ and √(B_RE/2) are made consistent with each other."""


@dataclass(frozen=True, eq=False)
class Objective:
    """What does not change while a posterior, or a stack of them, is optimized."""

    prior_mean: Float[Tensor, "*B P"]
    """θ₀."""
    grid: PriorGrid
    examples: int
    """N."""
    delta: float | int
    loss_scale: float | int
    """The cross-entropy is multiplied by it."""
    log_caps: Float[Tensor, " B"] | None = None
    """Of a stack whose members' grids end at caps of their own; they are alike otherwise."""

    @property
    def parameters(self) -> int:
        """P."""
        return self.prior_mean.shape[-1]

    @cached_property
    def constant(self) -> float:
        """log(π²N/6δ)."""
        return math.log(math.pi**2 * self.examples / (6 * self.delta))

    @property
    def log_cap(self) -> float | Tensor:
        """Log of the caps."""
        return math.log(self.grid.cap) if self.log_caps is None else self.log_caps


@dataclass(eq=False)
class Posterior:
    """Mean, standard deviations in the bases, and the prior's λ, all in one tensor that optimizers change.

    Where the objective's prior mean has a leading axis, it is a stack of posteriors of one architecture, which are
    optimized as one tensor program.
    """

    objective: Objective
    theta: Float[Tensor, " Q"]
    bases: Bases
    grad: Float[Tensor, " Q"] = field(init=False)

    def __post_init__(self) -> None:
        self.grad = torch.zeros_like(self.theta)

    def _parts(self, flat: Float[Tensor, " Q"]) -> tuple[Tensor, Tensor, Tensor]:
        """What belongs to w, to ς and to ρ."""
        like = self.objective.prior_mean
        n = like.numel()
        return flat[:n].view_as(like), flat[n : 2 * n].view_as(like), flat[2 * n :].view(like.shape[:-1])

    @cached_property
    def _grads(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._parts(self.grad)

    @cached_property
    def mean(self) -> Float[Tensor, "*B P"]:
        """w."""
        return self._parts(self.theta)[0]

    @cached_property
    def log_std(self) -> Float[Tensor, "*B P"]:
        """ς, in the bases."""
        return self._parts(self.theta)[1]

    @cached_property
    def half_log(self) -> Float[Tensor, "*B"]:
        """ρ = ½ log λ."""
        return self._parts(self.theta)[2]

    def project(self) -> None:
        """No λ beyond j = 1."""
        o = self.objective
        most = 0.5 * (o.log_cap - 1 / o.grid.precision)
        self.half_log.clamp_(max=most)

    def backward(
        self,
        model: nn.Module,
        x: Tree,
        y: Int[Tensor, "*B N"],
        generator: torch.Generator | None = None,
        noise: Float[Tensor, "*B P"] | None = None,
    ) -> Int[Tensor, "*B"]:
        """The gradient of the objective at one drawn network and batch, into `grad`; how many it classified wrongly.

        `noise` stands for ξ where it is given. Members of a stack have batches and noise of their own.
        """
        with torch.no_grad():
            if noise is None:
                noise = torch.empty_like(self.mean).normal_(generator=generator)
            std = self.log_std.exp()
            noise = noise * std
            drawn = self.bases.to_standard(noise) + self.mean
        f = self._outputs(model, drawn.requires_grad_(), x)
        loss = nn.functional.cross_entropy(f.flatten(0, -2), y.flatten(), reduction="sum")
        (g,) = torch.autograd.grad(loss * (self.objective.loss_scale / y.shape[-1]), drawn)
        with torch.no_grad():
            self._regularized(std, g)
            self._grads[1].addcmul_(self.bases.to_basis(g), noise)
            return (f.detach().argmax(-1) != y).sum(-1)

    def _outputs(self, model: nn.Module, drawn: Tensor, x: Tree) -> Tensor:
        params = pieces(drawn, self.bases.table.shapes)
        return outputs(model, params, x) if drawn.ndim == 1 else vmap(lambda p, x: outputs(model, p, x))(params, x)

    def _regularized(self, std: Float[Tensor, "*B P"], g: Float[Tensor, "*B P"]) -> None:
        """∇√(B_RE/2) into `grad`, with g added where it is w's; all in tensors, without a synchronization."""
        o, P, b = self.objective, self.objective.parameters, self.objective.grid.precision
        half_log, log_std = self.half_log, self.log_std
        of_mean, of_log_std, of_half_log = self._grads
        moved, precision = self.mean - o.prior_mean, torch.exp(-2 * half_log)
        squares = [torch.linalg.vector_norm(v, dim=-1).square() for v in (std, moved)]
        spread = (squares[0] + squares[1]) * precision
        j = (b * (o.log_cap - 2 * half_log)).clamp_min(1.0)
        kl = 0.5 * (spread - P) + P * half_log - log_std.sum(-1)
        rate = (kl + 2 * j.log() + o.constant) / (o.examples - 1)
        weight = 1 / (math.sqrt(8) * rate.clamp_min(1e-12).sqrt() * (o.examples - 1))  # 1/(4√(B_RE/2)(N − 1))
        scaled = (precision * weight).unsqueeze(-1)
        torch.addcmul(g, moved, scaled, out=of_mean)
        torch.addcmul(-weight.unsqueeze(-1), std * scaled, std, out=of_log_std)
        of_half_log.copy_(weight * (P - spread - 4 * b / j))

    @torch.no_grad()
    def draw(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        """n networks, ``[n, *shape]`` by parameter."""
        noise = torch.randn(
            n, self.objective.parameters, generator=generator, device=self.theta.device, dtype=self.theta.dtype
        )
        flat = self.mean + self.bases.to_standard(noise * self.log_std.exp())
        return pieces(flat, self.bases.table.shapes)

    @torch.no_grad()
    def spread_and_entropies(self) -> tuple[float, float]:
        """``Σs + ‖w − θ₀‖²`` and ``Σ log s``, in double precision."""
        spread = (2 * self.log_std.double()).exp().sum()
        spread = spread + (self.mean.double() - self.objective.prior_mean.double()).square().sum()
        return float(spread), float(2 * self.log_std.double().sum())

    def bound(self, error: float | int, j: int | None = None) -> dict[str, float]:
        """KL, j, ½ log λ, B_RE and the bound for an empirical error; by default at the best j."""
        o = self.objective
        spread, entropies = self.spread_and_entropies()
        j = o.grid.best(spread, entropies, o.parameters) if j is None else j
        half_log = o.grid.half_log(j)
        kl = divergence(spread, entropies, o.parameters, half_log)
        rate = relative_entropy_rate(max(kl, 0.0), j, o.examples, o.delta)
        return {
            "bound": float(kl_inverse(error, rate)),
            "kl": kl,
            "j": j,
            "half_log_lambda": half_log,
            "rate": rate,
            "error": float(error),
        }

    @torch.no_grad()
    def on_grid(self, errors: Float[Tensor, "*B"]) -> dict[str, Tensor]:
        """What `bound` gives, at the prior nearest to λ, for a stack as well."""
        o, b = self.objective, self.objective.grid.precision
        j = (b * (o.log_cap - 2 * self.half_log.double())).round().clamp_min(1)
        half_log = 0.5 * (o.log_cap - j / b)
        spread = (2 * self.log_std.double()).exp().sum(-1)
        spread = spread + (self.mean.double() - o.prior_mean.double()).square().sum(-1)
        kl = 0.5 * (spread * torch.exp(-2 * half_log) - o.parameters) + o.parameters * half_log
        kl = kl - self.log_std.double().sum(-1)
        rate = (kl.clamp_min(0) + 2 * j.log() + o.constant) / (o.examples - 1)
        bound = kl_inverse(errors.double(), rate)
        assert isinstance(bound, Tensor)
        return {"bound": bound, "kl": kl, "j": j, "half_log_lambda": half_log, "error": errors}

    @torch.no_grad()
    def layer_kl(self, half_log: float | int) -> dict[str, float]:
        """KL by layer; they add up to the whole, since the prior is the same in every basis."""
        moved = self.mean.double() - self.objective.prior_mean.double()
        log_std = self.log_std.double()
        spread = (2 * log_std).exp() + moved.square()  # a rotation keeps each layer's sum of squares
        return self.bases.layer_sums(0.5 * (spread * math.exp(-2 * half_log) - 1) + half_log - log_std)


def start(objective: Objective, mean: Float[Tensor, " P"], bases: Bases, initial: str) -> Posterior:
    """The posterior before its first step.

    ``"weights"``: s = w² as printed, whatever the basis; ``"rotated"``: the squares of w's own coordinates in it;
    ``"curvature"``: s = 1/(1/λ + βh) with the curvature h along each direction, which makes the objective least where
    the loss is ``½ Σ h s`` more than at w: β = 4√(B_RE/2)(N − 1) times the scale of the loss, and
    λ = (Σs + ‖w − θ₀‖²)/P, both consistent with s.
    """
    half_log = min(START, objective.grid.most)
    if initial == "curvature":
        assert bases.curvature is not None
        log_std, half_log = _from_curvature(objective, mean, bases.curvature)
    else:
        size = (mean if initial == "weights" else bases.to_basis(mean)).abs()
        least = SMALLEST * size.square().mean().sqrt().clamp_min(torch.finfo(size.dtype).tiny)
        log_std = size.clamp_min(least).log()
    return Posterior(objective, torch.cat([mean, log_std, mean.new_tensor([half_log])]), bases)


def _from_curvature(objective: Objective, mean: Tensor, curvature: Tensor) -> tuple[Tensor, float]:
    o, h = objective, curvature.double().clamp_min(0)
    moved = float((mean.double() - o.prior_mean.double()).square().sum())
    half_log, root = min(START, o.grid.most), 0.5
    variance = torch.full_like(h, math.exp(2 * half_log))
    for _ in range(ROUNDS):
        strength = 4 * root * (o.examples - 1) * o.loss_scale
        variance = 1 / (math.exp(-2 * half_log) + strength * h)
        spread = float(variance.sum()) + moved
        half_log = min(0.5 * math.log(spread / o.parameters), o.grid.most)
        kl = divergence(spread, float(variance.log().sum()), o.parameters, half_log)
        root = (relative_entropy_rate(max(kl, 0.0), o.grid.index(half_log), o.examples, o.delta) / 2) ** 0.5
    return (0.5 * variance.log()).to(mean.dtype), half_log
