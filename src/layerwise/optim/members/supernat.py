"""SuperNat: gradient descent that stretches its features along what it has still to learn (George 2023, section 6.4.1).

Of the features (the Jacobian on the training inputs) Φ = U√Λ Vᵀ only the eigenvalues λ_j of the kernel change. After a
gradient step in the current coordinates they become λ_j,t+1 = |u_jᵀ∇_f L| λ_j,t/κ, which makes the step's part of the
complexity bound smallest (Proposition 6.4.2). In the parameters that the user has this is natural gradient descent:
mode j of the step is multiplied by λ_j,t/λ_j,0, and, since v_jᵀ∇_w L = √λ_j,0 u_jᵀ∇_f L, it needs no more than the
gradient. Along directions that no training output depends on the metric is the identity, as in (6.4.8).
"""

import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, NameLookupError, describe, unknown
from layerwise.foundations.vectors import trainable, unwrap
from layerwise.kernel.jacobian import jacobian
from layerwise.kernel.outputs import Selection

KAPPAS = ("initial-max", "trace")
OWN = ("model", "x", "kappa", "refresh_every", "_how", "_values", "_right", "_scales", "_divisor", "_steps")
FLOOR = 1e-12
"""The least |u_jᵀ∇_f L| that is reckoned with, so that no mode ends at zero in one step."""
NULL = {torch.float64: 1e-12}
"""Eigenvalues below this share of the largest (10⁻⁸ in less than double precision) are rounding, and no modes."""


class SuperNat(torch.optim.Optimizer):
    """Natural gradient descent in a metric that is learned along the way; for full batches and a plain loop.

    Modes whose gradient is large keep their pace, others slow down and freeze: what is learned late, such as noise, is
    not learned. The gradient must be that of a loss on the inputs `x`, all at once. Gradients outside the span of their
    Jacobian, such as those of a penalty, are stepped along as gradient descent does. It keeps a matrix of parameters ×
    modes, in double precision.

    >>> import torch, layerwise as lw
    >>> x, y = torch.randn(20, 4), torch.randn(20, 1)
    >>> model = torch.nn.Linear(4, 1)
    >>> opt = lw.optim.SuperNat(model, x, lr=0.1)
    >>> for _ in range(3):
    ...     opt.zero_grad()
    ...     torch.nn.functional.mse_loss(model(x), y).backward()
    ...     opt.step()
    >>> opt.scales.shape
    torch.Size([5])

    Args:
        model: whose parameters are trained; it is left as it was.
        x: all training inputs, as `lw.jacobian` takes them.
        lr: η. A mode starts at the pace of gradient descent, which is stable below 2n/λ_1 for the mean of ½(f − y)².
        kappa: the κ that eigenvalues are divided by. "initial-max": the largest |u_jᵀ∇_f L| of the first step, kept, so
            that the kernel freezes as the loss falls. "trace": anew in every step, so that the trace of the kernel
            stays; then modes that were slow are stretched again in the end, and all is learned as by gradient descent.
        refresh_every: steps between new Jacobians, for a model that is not linear in its parameters; None: never. A new
            mode starts from the stretch that the old metric has along it.
        outputs: which outputs of the model the loss is of, see `lw.jacobian`.
        memory: bytes that the Jacobian may use, see `lw.jacobian`.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        lr: float | int = 1e-2,
        *,
        kappa: Literal["initial-max", "trace"] = "initial-max",
        refresh_every: int | None = None,
        outputs: Selection = "all",
        memory: int | float | None = None,
    ) -> None:
        if kappa not in KAPPAS:
            raise NameLookupError(unknown("kappa", kappa, KAPPAS))
        if not 0 < lr < float("inf"):
            raise InputError(describe(f"lr={lr}", "a number > 0", "take e.g. n/λ_1, half of what is stable"))
        if refresh_every is not None and refresh_every < 1:
            raise InputError(describe(f"refresh_every={refresh_every}", "a number ≥ 1, or None", "take e.g. 10"))
        self.model, self.x, self.kappa, self.refresh_every = unwrap(model), x, kappa, refresh_every
        self._how: dict[str, Any] = {"outputs": outputs, "memory": memory}
        self._values, self._right = self._decomposed()
        if refresh_every is None and not self._is_linear():
            warnings.warn(
                "SuperNat of a model that is not linear in its parameters: with the Jacobian of the start, modes of "
                "small eigenvalues may grow without bound. Pass refresh_every=1, or a few steps.",
                stacklevel=2,
            )
        self._scales = torch.ones_like(self._values)
        self._divisor: float | None = None
        self._steps = 0
        super().__init__(list(trainable(self.model).values()), {"lr": lr})

    @property
    def scales(self) -> Tensor:
        """λ_j,t/λ_j,0 of the modes, in descending order of λ_j,0."""
        return self._scales.clone()

    @property
    def eigenvalues(self) -> Tensor:
        """λ_j,t, of the kernel as it is stretched now."""
        return self._values * self._scales

    def _decomposed(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of the kernel, descending, and the right singular vectors of the Jacobian as columns."""
        J = jacobian(self.model, self.x, progress=False, **self._how).to_dense()
        _, singular, Vt = torch.linalg.svd(J.double(), full_matrices=False)
        values = singular.square()
        used = values > NULL.get(J.dtype, 1e-8) * values[0]
        if not bool(used.any()):
            raise InputError(describe("a Jacobian of zeros", "outputs that depend on parameters", "check the model"))
        return values[used], Vt[used].mT.contiguous()

    @torch.no_grad()
    def _is_linear(self) -> bool:
        """Whether eigenvalues stay where parameters move a little; they are put back as they were."""
        kept = [(p, p.clone()) for p in trainable(self.model).values()]
        try:
            for p, _ in kept:
                p.add_(0.1 * (p.abs().mean() + 1e-3))
            with torch.enable_grad():
                values, _ = self._decomposed()
        finally:
            for p, before in kept:
                p.copy_(before)
        same = len(values) == len(self._values)
        return same and bool(((values - self._values).abs() <= 1e-3 * self._values[0]).all())

    def _refresh(self) -> None:
        before, stretched = self._right, self._scales - 1
        self._values, self._right = self._decomposed()
        self._scales = 1 + (self._right.mT @ before).square() @ stretched

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step with the gradients there are; then the kernel is stretched along them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.refresh_every is not None and self._steps and self._steps % self.refresh_every == 0:
            self._refresh()
        (group,) = self.param_groups
        params = group["params"]
        g = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().double() for p in params])
        along = self._right.mT @ g  # √λ_j,0 u_jᵀ∇_f L
        step = g + self._right @ ((self._scales - 1) * along)
        start = 0
        for p in params:
            p.sub_(group["lr"] * step[start : start + p.numel()].view_as(p).to(p.dtype))
            start += p.numel()
        self._stretch((along.abs() / self._values.sqrt()).clamp_min(FLOOR))
        self._steps += 1
        return loss

    def _stretch(self, pull: Tensor) -> None:
        """λ_j ← |u_jᵀ∇_f L| λ_j/κ."""
        if self.kappa == "trace":
            kappa = (pull * self.eigenvalues).sum() / self.eigenvalues.sum()
        else:
            if self._divisor is None:
                if float(pull.max()) <= FLOOR:  # no gradient yet
                    return
                self._divisor = float(pull.max())
            kappa = self._divisor
        self._scales = self._scales * pull / kappa

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: torch's has the groups and their state alone."""
        return super().__getstate__() | {name: value for name, value in self.__dict__.items() if name in OWN}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One group alone: modes are of all parameters together."""
        if self.param_groups:
            raise InputError(describe("a second group of parameters", "one", "make a new SuperNat for another model"))
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """As torch's, with the modes and how they are stretched."""
        own = {"values": self._values, "right": self._right, "scales": self._scales}
        return super().state_dict() | {"modes": {**own, "divisor": self._divisor, "steps": self._steps}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """The run goes on as it would have."""
        own = state_dict.get("modes")
        if own is None or own["right"].shape[0] != self._right.shape[0]:
            given = "a state without modes" if own is None else f"modes of {own['right'].shape[0]} parameters"
            raise InputError(describe(given, f"the state of a SuperNat of {self._right.shape[0]}", "save it with this"))
        super().load_state_dict({name: part for name, part in state_dict.items() if name != "modes"})
        self._values, self._right, self._scales = (
            own[name].to(self._right.device, torch.float64, copy=True) for name in ("values", "right", "scales")
        )
        self._divisor, self._steps = own["divisor"], own["steps"]

    def __repr__(self) -> str:
        modes = f"{len(self._values)} modes of {self._right.shape[0]} parameters"
        return f"SuperNat(lr={self.param_groups[0]['lr']}, kappa={self.kappa!r}, {modes})"
