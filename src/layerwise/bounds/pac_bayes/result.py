"""What a bound is made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.bounds.pac_bayes.examples import Examples
from layerwise.bounds.pac_bayes.monte_carlo import stochastic_error
from layerwise.bounds.pac_bayes.posterior import Posterior
from layerwise.foundations.random import stream
from layerwise.foundations.vectors import ParamVector


@dataclass(frozen=True, eq=False, repr=False)
class PacBayes:
    """A bound on the error of a network whose weights are drawn anew for every example, and how it came about."""

    method: str
    bound: float
    """kl⁻¹(`error_limit`, `rate`): holds with probability 1 − δ − δ′ over training data and drawn networks."""
    bound_without_correction: float
    """kl⁻¹(`error`, `rate`), as Table C.8 prints it: the drawn networks' mean error stands for the exact one."""
    kl: float
    """KL(Q ‖ P)."""
    error: float
    """Of the stochastic network on the training data: "SNN loss" of the thesis."""
    error_limit: float
    """What that error exceeds with probability δ′ at most."""
    rate: float
    """B_RE."""
    half_log_lambda: float
    """½ log λ of the prior."""
    j: int
    """The prior's place on its grid."""
    layer_kl: dict[str, float]
    """KL by layer."""
    mean_error: float
    """Of the given network on the training data."""
    examples: int
    parameters: int
    draws: int
    delta: float | int
    delta_draws: float | int
    history: Sequence[dict[str, float | int]] = field(default_factory=list)
    """By epoch: error of the noisy batches, KL, ½ log λ, j and the bound that they would give."""
    posterior: Posterior | None = None
    model: nn.Module | None = None
    """A copy of the network, with the posterior's mean as weights."""

    @property
    def mean(self) -> ParamVector:
        """The posterior's mean."""
        assert self.posterior is not None
        return ParamVector.from_flat(self.posterior.mean.detach().clone(), self._network())

    @property
    def variance(self) -> Tensor:
        """The posterior's variances along the directions of its bases, flat."""
        assert self.posterior is not None
        return (2 * self.posterior.log_std).exp()

    def _network(self) -> nn.Module:
        assert self.model is not None
        return self.model

    def sample(self, n: int, seed: int = 0) -> dict[str, Tensor]:
        """n networks drawn from the posterior, ``[n, *shape]`` by parameter."""
        assert self.posterior is not None
        return self.posterior.draw(n, stream(seed, "sample", device=self.posterior.theta.device))

    def error_on(self, data: Any, draws: int = 100, seed: int = 0) -> float:
        """The stochastic network's error on other data, such as a test set, which the bound is about."""
        assert self.posterior is not None
        device = self.posterior.theta.device
        examples = Examples(data, 1, seed, device)
        generator = stream(seed, "held out", device=torch.device(device))
        return stochastic_error(self._network(), self.posterior, examples, draws, generator)

    def __repr__(self) -> str:
        capped = ": the cap binds, and a larger one, fixed in advance, may give a smaller bound" if self.j == 1 else ""
        return (
            f"PacBayes({self.method}: error ≤ {self.bound:.4f} with probability {1 - self.delta - self.delta_draws:g}; "
            f"training error {self.error:.4f}, KL {self.kl:.1f}, ½ log λ {self.half_log_lambda:.4f} "
            f"(j = {self.j}{capped}))"
        )
