"""A step size for gradient descent on a quadratic, learned by its meta-gradient: Wu (2023), section 5.3.

The inner problem is f(w) = ½wᵀHw from a given start, whose t-th iterate is w_t = (I − ηH)ᵗ w₀. Two meta-objectives:

- naive, F(η) = f(w_t): convex, but its derivative vanishes or explodes exponentially in t;
- log, F(η) = log f(w_t) / t: the derivative is bounded whatever t is, and leads to the one minimiser.

Backpropagation of the log objective still forms f(w_t) itself, and fails where that overflows. With r_i = 1 − ηλ_i and
the shares p_i = c_i²λ_i r_i^(2t) / Σ_j c_j²λ_j r_j^(2t) of f(w_t), the derivative is −2 Σ p_i λ_i / r_i: (5.1) divided
as Claim 5.3.5 divides it. The shares are a softmax of logarithms, so that nothing overflows, and coordinates of the
start that are tiny or zero count for what they are. All functions take problems and step sizes of any shape, computed
at once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise.foundations.errors import InputError, describe
from layerwise.meta.checks import Number, finite, step_sizes, whole


class SignedLog(NamedTuple):
    """A number too large or too small for its type: its sign, and the logarithm of its magnitude."""

    sign: Tensor
    logabs: Tensor


@dataclass(frozen=True, eq=False)
class Quadratic:
    """Quadratic inner problems by their spectra, in float64: eigenvalues of H, and the start in its eigenbasis.

    >>> problem = Quadratic.of(torch.diag(torch.tensor([1.0, 2.0])), torch.tensor([0.6, 0.8]))
    >>> round(float(problem.best_step(steps=1)), 4)
    0.5328
    >>> bool(problem.gradient(0.1, steps=1000) < 0)  # no overflow, whatever the number of steps
    True
    """

    eigenvalues: Float[Tensor, "*problems d"]
    """λ_i > 0, kept in ascending order, and c with them."""
    c: Float[Tensor, "*problems d"]
    """⟨w₀, u_i⟩; the log objective's derivative does not depend on their scale."""

    def __post_init__(self) -> None:
        if self.eigenvalues.shape != self.c.shape:
            given = f"eigenvalues {tuple(self.eigenvalues.shape)} and c {tuple(self.c.shape)}"
            raise InputError(describe(given, "tensors of one shape", "give one coordinate for each eigenvalue"))
        finite(self.eigenvalues, "eigenvalues")
        finite(self.c, "c")
        if not bool((self.eigenvalues > 0).all()):
            given = f"an eigenvalue of {float(self.eigenvalues.min()):g}"
            raise InputError(describe(given, "H positive definite", "add a multiple of the identity to H"))
        if not bool((self.c != 0).any(-1).all()):
            raise InputError(describe("a start of zero", "a start with f(w₀) > 0", "draw w₀ at random"))
        ascending = self.eigenvalues.double().sort(-1)
        object.__setattr__(self, "eigenvalues", ascending.values)
        object.__setattr__(self, "c", self.c.double().gather(-1, ascending.indices))

    @classmethod
    def of(cls, H: Float[Tensor, "*problems d d"], start: Float[Tensor, "*problems d"]) -> "Quadratic":
        """From matrices H, symmetric and positive definite, and starts w₀."""
        if H.shape[:-1] != start.shape or H.shape[-1] != start.shape[-1]:
            given = f"H {tuple(H.shape)} and start {tuple(start.shape)}"
            raise InputError(describe(given, "H […, d, d] and start […, d]", "give both one d"))
        H = finite(H, "H").double()
        if not torch.allclose(H, H.mT, rtol=1e-6, atol=float(1e-6 * H.abs().max())):
            raise InputError(describe("an H that is not symmetric", "H = Hᵀ", "pass (H + H.mT) / 2"))
        eigenvalues, vectors = torch.linalg.eigh(H)
        return cls(eigenvalues, (vectors.mT @ finite(start, "start").double()[..., None])[..., 0])

    @classmethod
    def random(cls, problems: int, d: int = 20, generator: torch.Generator | None = None) -> "Quadratic":
        """H = XᵀX with Gaussian X, d × d, and Gaussian starts: the problems of section 5.5."""
        shape = (whole(problems, "problems", 5), whole(d, "d", 20))
        X = torch.randn(*shape, d, generator=generator, dtype=torch.float64)
        return cls.of(X.mT @ X, torch.randn(*shape, generator=generator, dtype=torch.float64))

    def normalized(self) -> "Quadratic":
        """The same problems from starts of unit norm, as the theorems have them."""
        c = self.c / self.c.abs().amax(-1, keepdim=True)  # whose squares neither overflow nor vanish
        return Quadratic(self.eigenvalues, c / c.norm(dim=-1, keepdim=True))

    # --- the log objective ------------------------------------------------------------------------------------

    def objective(self, eta: Number | Tensor, steps: int) -> Tensor:
        """log f(w_t) / t, without forming f(w_t); −∞ where w_t = 0."""
        t = whole(steps, "steps")
        return (self._log_terms(self._factors(eta), 2 * t).logsumexp(-1) - math.log(2)) / t

    def gradient(self, eta: Number | Tensor, steps: int) -> Tensor:
        """The derivative of log f(w_t) / t in η (5.1), in numbers of order one: the stable meta-gradient.

        Zero where w_t = 0, which one step reaches from a start along eigenvectors of one eigenvalue.
        """
        return self._gradient(step_sizes(eta, zero=True).to(self.eigenvalues), whole(steps, "steps"))

    def best_step(self, steps: int) -> Tensor:
        """η*, the one zero of `gradient`, in [1/L, 1/α] (Claim 5.3.4): by bisection to the last digit."""
        low, high = 1 / self.eigenvalues[..., -1], 1 / self.eigenvalues[..., 0]
        for _ in range(200):
            middle = (low + high) / 2
            falling = self.gradient(middle, steps) < 0
            low, high = torch.where(falling, middle, low), torch.where(falling, high, middle)
        return (low + high) / 2

    def learn(
        self,
        start: Number | Tensor,
        steps: int,
        meta_steps: int = 1000,
        rate: Callable[[int], float] = lambda k: 0.01 / math.sqrt(k),
        gradient: Callable[[Tensor], Tensor] | None = None,
    ) -> Float[Tensor, "path *problems"]:
        """Meta-descent η ← max(η − μ_k F'(η), 0), as in Theorem 5.3.2; the path of η, its start included.

        Args:
            start: η₀ > 0.
            steps: t.
            meta_steps: steps on η.
            rate: μ_k of step k = 1, 2, …; that of section 5.5 by default, 1/(100√k).
            gradient: another derivative than the stable one, to be compared with it.
        """
        shape = self.eigenvalues.shape[:-1]
        eta = torch.broadcast_to(step_sizes(start).double(), shape).clone()
        path, steps = [eta], whole(steps, "steps")
        derivative = gradient or (lambda eta: self._gradient(eta, steps))
        for k in range(1, whole(meta_steps, "meta_steps", 1000) + 1):
            # maximum, unlike clamp of a NaN to zero, keeps NaN: a step that failed stays visible
            eta = torch.maximum(eta - rate(k) * derivative(eta), torch.zeros_like(eta))
            path.append(eta)
        return torch.stack(path)

    # --- the naive objective ----------------------------------------------------------------------------------

    def naive_objective(self, eta: Number | Tensor, steps: int) -> Tensor:
        """f(w_t); infinite where it overflows."""
        return (self.objective(eta, steps) * steps).exp()

    def naive_gradient(self, eta: Number | Tensor, steps: int) -> Tensor:
        """The derivative of f(w_t) in η, −t Σ c²λ²(1 − ηλ)^(2t−1); ±∞ where it overflows."""
        sign, logabs = self.naive_log_gradient(eta, steps)
        return sign * logabs.exp()

    def naive_log_gradient(self, eta: Number | Tensor, steps: int) -> SignedLog:
        """The same as a sign and a logarithm, which do not overflow."""
        r, t = self._factors(eta), whole(steps, "steps")
        terms = self._log_terms(r, 2 * t - 1) + self.eigenvalues.log()
        largest = terms.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        total = -(r.sign() * (terms - largest).exp()).sum(-1)
        return SignedLog(total.sign(), math.log(t) + largest[..., 0] + total.abs().log())

    # --- by steps, to be differentiated by others -----------------------------------------------------------------

    def loss(self, w: Float[Tensor, "*problems d"]) -> Tensor:
        """½wᵀHw of a point in the eigenbasis, in the precision of w."""
        return 0.5 * (self.eigenvalues.to(w.dtype) * w * w).sum(-1)

    def _gradient(self, eta: Tensor, t: int) -> Tensor:
        r = 1 - eta[..., None] * self.eigenvalues
        shares = self._log_terms(r, 2 * t).softmax(-1).nan_to_num(0.0)  # NaN where all terms are zero, w_t = 0
        return -2 * (shares * torch.where(r == 0, 0.0, self.eigenvalues / r)).sum(-1)

    def _log_terms(self, r: Tensor, power: int) -> Tensor:
        """log c²λ|r|^power."""
        return 2 * self.c.abs().log() + self.eigenvalues.log() + power * r.abs().log()

    def _factors(self, eta: Number | Tensor) -> Tensor:
        return 1 - step_sizes(eta, zero=True).to(self.eigenvalues)[..., None] * self.eigenvalues
