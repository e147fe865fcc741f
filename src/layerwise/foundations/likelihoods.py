"""Likelihoods: functions of the model's output and the target alone, which know no layer.

A likelihood sees outputs in standard form, ``f [N, S, C]``: N examples, S positions, C numbers at each. With
``m`` the mask (0 or 1) and ``w`` a term's weight, the loss of the data is

    L = 1/N Σ_n Σ_s m_ns w_ns ℓ(f_ns, y_ns)

and its curvature at the output ``1/N Σ_n Σ_s m_ns w_ns H(f_ns)``. N counts examples of all the data; the
division is made once, where the statistics are finished, never here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from layerwise.foundations.errors import InputError, NameLookupError, UnsupportedError, describe, nearest, unknown


@dataclass(frozen=True)
class Terms:
    """A batch at the output, in standard form."""

    f: Float[Tensor, "N S C"]
    y: Shaped[Tensor, "N S *rest"] | None
    """Class indices [N, S], or values [N, S, C]; None where the data has no target."""
    weight: Float[Tensor, "N S"]
    """m · w: what each term counts."""
    mask: Bool[Tensor, "N S"] | None
    """Which positions count; None if all do."""
    positions: tuple[int, ...] = ()
    """The shape that S was flattened from."""
    part: tuple[int, int] | None = None
    """First example and number of examples of the whole batch, where these terms are a part of it."""

    def target(self) -> Tensor:
        """The target, or an error that says one is needed."""
        if self.y is None:
            raise InputError(
                describe(
                    "a batch without a target",
                    "a batch (x, y)",
                    'give y, or use estimator="sampled" or "exact"',
                )
            )
        return self.y


class Likelihood(ABC):
    """Loss, gradient, Hessian root and sampling at the output; subclass it for a likelihood of your own.

    `loss` and `gradient` carry the term's weight ``m·w``; `root` carries its square root.
    """

    name: str

    @abstractmethod
    def standardize(self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor]) -> Terms:
        """Bring output and target to standard form; `arrange` moves the examples to the front."""

    @abstractmethod
    def loss(self, terms: Terms) -> Float[Tensor, "N S"]:
        """``m w ℓ``, one number a term."""

    @abstractmethod
    def gradient(self, terms: Terms) -> Float[Tensor, "N S C"]:
        """``∂(m w ℓ)/∂f`` at the data's own target."""

    @abstractmethod
    def columns(self, terms: Terms) -> int:
        """How many root columns one position has."""

    @abstractmethod
    def root(self, terms: Terms, start: int, stop: int) -> Float[Tensor, "R N S C"]:
        """Columns ``start … stop`` of L with ``L Lᵀ = m w H(f)``, for every term."""

    @abstractmethod
    def sample(self, terms: Terms, generator: torch.Generator) -> Float[Tensor, "N S C"]:
        """One random vector a term whose second moment is ``m w H(f)``: a label drawn from the model."""

    @abstractmethod
    def hessian_product(self, terms: Terms, u: Float[Tensor, "*B N S C"]) -> Float[Tensor, "*B N S C"]:
        """``m w H(f) u``."""


def _last_axis_terms(f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor], name: str) -> Terms:
    """Standard form for likelihoods of real or 0/1 vectors: target and output have one shape."""
    if y is not None and (not isinstance(y, Tensor) or y.shape != f.shape):
        given = (
            f"a target of shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a target of type {type(y).__name__}"
        )
        raise InputError(
            describe(
                f"{given} for an output of shape {tuple(f.shape)}",
                f"for likelihood {name!r}, a target of the output's own shape",
                "reshape the target (a silent broadcast would mix examples)",
            )
        )
    elementwise = mask is not None and mask.shape == f.shape and f.ndim > 1
    axes = f.ndim if elementwise or f.ndim == 1 else f.ndim - 1
    lead = f.shape[:axes]
    if mask is not None and mask.shape != lead:
        raise InputError(
            describe(
                f"a mask of shape {tuple(mask.shape)} for an output of shape {tuple(f.shape)}",
                f"shape {tuple(lead)}",
                "give one entry for each example and position",
            )
        )

    def standard(t: Tensor) -> Tensor:
        arranged = arrange(t.reshape(*lead, -1))
        return arranged.reshape(arranged.shape[0], -1, arranged.shape[-1])

    f_std = standard(f)
    keep = None if mask is None else standard(mask)[..., 0].bool()
    y_std = None if y is None else standard(y)
    if y_std is not None and keep is not None:
        y_std = torch.where(keep.unsqueeze(-1), y_std, 0)  # a value that is missing may be anything, NaN too
    weight = f_std.new_ones(f_std.shape[:2]) if keep is None else keep.to(f_std.dtype)
    positions = tuple(arrange(f.reshape(*lead, -1)).shape[1:-1])
    return Terms(f_std, y_std, weight.detach(), keep, positions)


@dataclass(frozen=True, kw_only=True)
class Gaussian(Likelihood):
    """``ℓ = ‖y − f‖² / 2σ²``, summed over the entries of f; ``H = I/σ²``.

    >>> Gaussian().name
    'gaussian'
    """

    variance: float = 1.0
    name = "gaussian"

    def __post_init__(self) -> None:
        if not self.variance > 0:
            raise InputError(describe(f"variance={self.variance}", "a number > 0", "pass e.g. variance=1.0"))

    def standardize(self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor]) -> Terms:
        """Outputs and targets of one shape; the last axis is C."""
        if isinstance(y, Tensor) and not y.is_floating_point():
            raise InputError(describe(f"a target of dtype {y.dtype}", "a floating-point target", "call y.float()"))
        return _last_axis_terms(f, y, mask, arrange, self.name)

    def loss(self, terms: Terms) -> Float[Tensor, "N S"]:
        """``m ‖y − f‖² / 2σ²``."""
        return terms.weight * (terms.target() - terms.f).square().sum(-1) / (2 * self.variance)

    def gradient(self, terms: Terms) -> Float[Tensor, "N S C"]:
        """``m (f − y) / σ²``."""
        return terms.weight.unsqueeze(-1) * (terms.f.detach() - terms.target()) / self.variance

    def columns(self, terms: Terms) -> int:
        """C."""
        return terms.f.shape[-1]

    def root(self, terms: Terms, start: int, stop: int) -> Float[Tensor, "R N S C"]:
        """``√m e_k / σ``."""
        scale = (terms.weight / self.variance).sqrt()
        return torch.einsum("ns,rc->rnsc", scale, _basis(terms.f, start, stop))

    def sample(self, terms: Terms, generator: torch.Generator) -> Float[Tensor, "N S C"]:
        """``√m ε / σ``, ε standard normal."""
        return (terms.weight / self.variance).sqrt().unsqueeze(-1) * _normal(terms.f, terms, generator)

    def hessian_product(self, terms: Terms, u: Float[Tensor, "*B N S C"]) -> Float[Tensor, "*B N S C"]:
        """``m u / σ²``."""
        return (terms.weight / self.variance).unsqueeze(-1) * u


@dataclass(frozen=True, kw_only=True)
class Bernoulli(Likelihood):
    """Independent binary labels, ``q = sigmoid(f)``: ``ℓ = BCE(f, y)`` summed over entries; ``H = diag q(1−q)``."""

    name = "bernoulli"

    def standardize(self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor]) -> Terms:
        """Outputs and targets of one shape; targets lie in [0, 1]."""
        if isinstance(y, Tensor):
            y = y.to(f.dtype) if not y.is_complex() else y
            if y.numel() and not bool(((y >= 0) & (y <= 1)).all()):
                raise InputError(
                    describe("targets outside [0, 1]", "probabilities or 0/1 labels", "rescale the target")
                )
        return _last_axis_terms(f, y, mask, arrange, self.name)

    def loss(self, terms: Terms) -> Float[Tensor, "N S"]:
        """``m BCE``."""
        bce = F.binary_cross_entropy_with_logits(terms.f, terms.target(), reduction="none")
        return terms.weight * bce.sum(-1)

    def gradient(self, terms: Terms) -> Float[Tensor, "N S C"]:
        """``m (q − y)``."""
        return terms.weight.unsqueeze(-1) * (terms.f.detach().sigmoid() - terms.target())

    def columns(self, terms: Terms) -> int:
        """C."""
        return terms.f.shape[-1]

    def root(self, terms: Terms, start: int, stop: int) -> Float[Tensor, "R N S C"]:
        """``√(m q(1−q)) e_k``."""
        scale = self._curvature(terms).sqrt()
        return torch.einsum("nsc,rc->rnsc", scale, _basis(terms.f, start, stop))

    def sample(self, terms: Terms, generator: torch.Generator) -> Float[Tensor, "N S C"]:
        """``√m (q − t)``, t drawn from the model."""
        q = terms.f.detach().sigmoid()
        t = (_uniform(q, terms, generator) < q).to(q.dtype)
        return terms.weight.sqrt().unsqueeze(-1) * (q - t)

    def hessian_product(self, terms: Terms, u: Float[Tensor, "*B N S C"]) -> Float[Tensor, "*B N S C"]:
        """``m q(1−q) u``."""
        return self._curvature(terms) * u

    def _curvature(self, terms: Terms) -> Tensor:
        q = terms.f.detach().sigmoid()
        return terms.weight.unsqueeze(-1) * q * (1 - q)


@dataclass(frozen=True, kw_only=True)
class Categorical(Likelihood):
    """Softmax cross-entropy on logits: ``H = diag p − ppᵀ``, one categorical variable a position.

    The term's weight is ``m_ns w_{y_ns}``: y is the data's label, also where labels are drawn from the model
    for the rest. Label smoothing changes the gradient only.

    Args:
        weight: one weight a class.
        ignore_index: positions with this label do not count.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        class_axis: which axis of the output holds the classes; found from the target's shape if None.
    """

    weight: Tensor | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    class_axis: int | None = None
    name = "categorical"

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise InputError(describe(f"label_smoothing={self.label_smoothing}", "a number in [0, 1]", "pass e.g. 0.1"))

    def standardize(self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor]) -> Terms:
        """Logits with the classes on their axis, labels without it."""
        axis = self._class_axis(f, y)
        logits = f.movedim(axis, -1)
        lead = logits.shape[:-1]
        f_std = arrange(logits)
        positions = tuple(f_std.shape[1:-1])
        f_std = f_std.reshape(f_std.shape[0], -1, f_std.shape[-1])
        n, s, c = f_std.shape
        labels = None if y is None else arrange(self._checked_labels(y, lead, c).unsqueeze(-1)).reshape(n, s)
        keep = None if labels is None or not bool((labels == self.ignore_index).any()) else labels != self.ignore_index
        if mask is not None:
            if mask.shape != lead:
                raise InputError(
                    describe(f"a mask of shape {tuple(mask.shape)}", f"shape {tuple(lead)}", "one entry a position")
                )
            given = arrange(mask.unsqueeze(-1)).reshape(n, s).bool()
            keep = given if keep is None else keep & given
        if keep is not None and labels is not None:
            labels = torch.where(keep, labels, 0)
        return Terms(f_std, labels, self._term_weight(f_std, labels, keep), keep, positions)

    def _class_axis(self, f: Tensor, y: Any) -> int:
        if self.class_axis is not None:
            if not -f.ndim <= self.class_axis < f.ndim:
                raise InputError(
                    describe(
                        f"class_axis={self.class_axis}",
                        f"an axis of the output {tuple(f.shape)}",
                        "correct it",
                    )
                )
            return self.class_axis % f.ndim
        if f.ndim < 2:
            raise InputError(
                describe(
                    f"an output of shape {tuple(f.shape)}",
                    "logits [N, C] or [N, positions, C]",
                    "add a class axis",
                )
            )
        if f.ndim == 2:
            return 1
        axes = (f.ndim - 1, 1)
        fitting = [a for a in axes if isinstance(y, Tensor) and y.shape == f.shape[:a] + f.shape[a + 1 :]]
        if len(set(fitting)) == 1:
            return fitting[0]
        what = f"y {tuple(y.shape)}" if isinstance(y, Tensor) else "no target"
        raise InputError(
            describe(
                f"an output of shape {tuple(f.shape)} with {what}",
                "an unambiguous class axis: a target of the output's shape without it",
                "pass likelihoods.Categorical(class_axis=-1) for [N, T, C], or class_axis=1 for [N, C, H, W]",
            )
        )

    def _checked_labels(self, y: Any, lead: torch.Size, classes: int) -> Tensor:
        if not isinstance(y, Tensor) or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            kind = f"dtype {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
            raise InputError(describe(f"a target of {kind}", "integer class labels", "call y.long()"))
        if y.shape != lead:
            raise InputError(
                describe(f"a target of shape {tuple(y.shape)}", f"shape {tuple(lead)}", "give one label a position")
            )
        valid = (y == self.ignore_index) | ((y >= 0) & (y < classes))
        if not bool(valid.all()):
            raise InputError(
                describe(
                    f"label {int(y[~valid][0])}",
                    f"labels 0 … {classes - 1}, or ignore_index={self.ignore_index}",
                    "correct the labels or the model's number of outputs",
                )
            )
        return y

    def _class_weights(self, f: Tensor) -> Tensor:
        assert self.weight is not None
        if self.weight.shape != f.shape[-1:]:
            raise InputError(
                describe(
                    f"class weights of shape {tuple(self.weight.shape)}",
                    f"shape ({f.shape[-1]},)",
                    "one a class",
                )
            )
        weight = self.weight.to(f)
        if not bool((torch.isfinite(weight) & (weight >= 0)).all()):
            raise InputError(describe("class weights that are negative or not finite", "weights ≥ 0", "correct them"))
        return weight

    def _term_weight(self, f: Tensor, labels: Tensor | None, keep: Tensor | None) -> Tensor:
        if self.weight is None:
            weight = f.new_ones(f.shape[:2])
        elif labels is None:
            raise InputError(
                describe(
                    "class weights and no target",
                    "labels y: the weight of a term is that of its label",
                    "give y",
                )
            )
        else:
            weight = self._class_weights(f)[labels]
        return (weight if keep is None else weight * keep).detach()

    def loss(self, terms: Terms) -> Float[Tensor, "N S"]:
        """``m [(1−ε) w_y (−log p_y) + ε/C Σ_c w_c (−log p_c)]``, as torch defines it."""
        surprise = -terms.f.log_softmax(-1)
        return (self._target_mass(terms) * surprise).sum(-1)

    def gradient(self, terms: Terms) -> Float[Tensor, "N S C"]:
        """``p Σ_c q_c − q`` with q the (weighted, smoothed) mass the loss puts on each class."""
        mass = self._target_mass(terms)
        return terms.f.detach().softmax(-1) * mass.sum(-1, keepdim=True) - mass

    def _target_mass(self, terms: Terms) -> Tensor:
        f, labels = terms.f.detach(), terms.target()
        mass = torch.zeros_like(f).scatter_(-1, labels.unsqueeze(-1), terms.weight.unsqueeze(-1))
        if self.label_smoothing == 0:
            return mass
        spread = f.new_ones(f.shape[-1]) if self.weight is None else self._class_weights(f)
        spread = spread * (self.label_smoothing / f.shape[-1])
        kept = f.new_ones(f.shape[:2]) if terms.mask is None else terms.mask.to(f.dtype)
        return (1 - self.label_smoothing) * mass + kept.unsqueeze(-1) * spread

    def columns(self, terms: Terms) -> int:
        """C − 1: the rank of ``diag p − ppᵀ``."""
        return max(terms.f.shape[-1] - 1, 1)

    def root(self, terms: Terms, start: int, stop: int) -> Float[Tensor, "R N S C"]:
        """Columns of the Cholesky root of ``m w (diag p − ppᵀ)``, in closed form.

        With ``t_j = Σ_{i ≥ j} p_i``, column j is ``√(p_j t_{j+1} / t_j) (e_j − p_{i>j} / t_{j+1})``: one
        backward pass fewer than the C vectors ``√p_y (e_y − p)``.
        """
        p = terms.f.detach().softmax(-1)
        c = p.shape[-1]
        tail = p.flip(-1).cumsum(-1).flip(-1)
        after = F.pad(tail[..., 1:], (0, 1))
        j = torch.arange(start, stop, device=p.device)
        p_j, tail_j, after_j = (t[..., j].movedim(-1, 0).unsqueeze(-1) for t in (p, tail, after))
        tiny = torch.finfo(p.dtype).tiny
        below = torch.arange(c, device=p.device) > j.view(-1, 1, 1, 1)
        column = torch.where(below, -p / after_j.clamp_min(tiny), _basis(p, start, stop)[:, None, None])
        scale = (terms.weight.unsqueeze(-1) * p_j * after_j / tail_j.clamp_min(tiny)).sqrt()
        return scale * column

    def sample(self, terms: Terms, generator: torch.Generator) -> Float[Tensor, "N S C"]:
        """``√(m w) (p − e_ŷ)`` with ŷ drawn from the model."""
        p = terms.f.detach().softmax(-1)
        # Inverse-CDF: two draws from one generator give the same label whatever the batch's device or chunking.
        u = _uniform(p[..., :1], terms, generator)
        drawn = (p.to(torch.float64).cumsum(-1) < u.to(torch.float64)).sum(-1, keepdim=True).clamp_max(p.shape[-1] - 1)
        v = p.scatter_add(-1, drawn, -torch.ones_like(drawn, dtype=p.dtype))
        return terms.weight.sqrt().unsqueeze(-1) * v

    def hessian_product(self, terms: Terms, u: Float[Tensor, "*B N S C"]) -> Float[Tensor, "*B N S C"]:
        """``m w (p ⊙ u − p pᵀu)``."""
        p = terms.f.detach().softmax(-1)
        return terms.weight.unsqueeze(-1) * p * (u - (p * u).sum(-1, keepdim=True))


@dataclass(frozen=True, kw_only=True)
class Custom(Likelihood):
    """A likelihood from functions of your own.

    Args:
        loss_fn: ``loss_fn(f, y)`` of one example (``f`` and ``y`` without the example axis), a scalar. Its
            gradient and Hessian come from autodiff; the Hessian must be positive semi-definite.
        hessian_root: optional ``f [N, C] -> [R, N, C]``, columns with ``Σ_r l_r l_rᵀ`` the Hessian.
        sample_gradient: optional ``(f [N, C], generator) -> [N, C]`` with the Hessian as second moment.

    >>> poisson = Custom(loss_fn=lambda f, y: (f.exp() - y * f).sum())
    """

    loss_fn: Callable[[Tensor, Any], Tensor]
    hessian_root: Callable[[Tensor], Tensor] | None = None
    sample_gradient: Callable[[Tensor, torch.Generator], Tensor] | None = None
    name = "custom"

    def standardize(self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor]) -> Terms:
        """One position a example; the output is flattened to C numbers."""
        if mask is not None:
            raise UnsupportedError(describe("a mask", "no mask with a custom likelihood", "mask inside loss_fn"))
        f_std = arrange(f.reshape(*f.shape[:1], -1)) if f.ndim > 1 else arrange(f.unsqueeze(-1))
        f_std = f_std.reshape(f_std.shape[0], 1, -1)
        n = f_std.shape[0]
        if isinstance(y, Tensor):
            if y.shape[:1] != (n,):
                raise InputError(describe(f"a target of shape {tuple(y.shape)}", f"{n} rows", "one target an example"))
            y = y.unsqueeze(1)
        return Terms(f_std, y, f_std.new_ones(n, 1).detach(), None, ())

    def loss(self, terms: Terms) -> Float[Tensor, "N S"]:
        """``ℓ(f_n, y_n)``."""
        y = terms.target()
        rows = [self.loss_fn(f_n[0], y_n[0]) for f_n, y_n in zip(terms.f, y, strict=True)]
        return torch.stack([row.reshape(()) for row in rows]).unsqueeze(1)

    def gradient(self, terms: Terms) -> Float[Tensor, "N S C"]:
        """``∂ℓ/∂f`` by autodiff."""
        f = terms.f.detach().requires_grad_()
        with torch.enable_grad():
            total = self.loss(replace(terms, f=f)).sum()
        return torch.autograd.grad(total, f)[0]

    def columns(self, terms: Terms) -> int:
        """Columns of the given root, or C."""
        if self.hessian_root is not None:
            return int(self.hessian_root(terms.f.detach()[:, 0]).shape[0])
        return terms.f.shape[-1]

    def root(self, terms: Terms, start: int, stop: int) -> Float[Tensor, "R N S C"]:
        """The given root, or ``U √Λ`` of the autodiff Hessian."""
        if self.hessian_root is not None:
            return self.hessian_root(terms.f.detach()[:, 0])[start:stop].unsqueeze(2)
        values, vectors = torch.linalg.eigh(self._hessian(terms))
        if bool((values < -1e-6 * values.abs().amax(-1, keepdim=True)).any()):
            raise InputError(
                describe("a custom loss that is not convex in the output", "a PSD output Hessian", "use lw.hessian")
            )
        columns = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        return columns.permute(2, 0, 1)[start:stop].unsqueeze(2)

    def sample(self, terms: Terms, generator: torch.Generator) -> Float[Tensor, "N S C"]:
        """The given sampler, or ``L ε`` with random signs."""
        if self.sample_gradient is not None:
            return self.sample_gradient(terms.f.detach()[:, 0], generator).unsqueeze(1)
        columns = self.root(terms, 0, self.columns(terms))
        uniform = _uniform(columns[..., 0].movedim(0, -1), terms, generator)  # N S R
        signs = uniform.sub(0.5).sign().movedim(-1, 0)
        return (columns * signs.unsqueeze(-1)).sum(0)

    def hessian_product(self, terms: Terms, u: Float[Tensor, "*B N S C"]) -> Float[Tensor, "*B N S C"]:
        """``H u``."""
        columns = self.root(terms, 0, self.columns(terms))
        return torch.einsum("rnsc,rnsd,...nsd->...nsc", columns, columns, u)

    def _hessian(self, terms: Terms) -> Float[Tensor, "N C C"]:
        y = terms.target()
        rows = [
            torch.func.hessian(lambda f, y_n=y_n: self.loss_fn(f, y_n[0]).reshape(()))(f_n[0])
            for f_n, y_n in zip(terms.f.detach(), y, strict=True)
        ]
        return torch.stack(rows)


def _basis(like: Tensor, start: int, stop: int) -> Tensor:
    """Rows start … stop of the identity of size C."""
    c = like.shape[-1]
    rows = torch.zeros(stop - start, c, dtype=like.dtype, device=like.device)
    rows[torch.arange(stop - start), torch.arange(start, stop)] = 1
    return rows


def _drawn(draw: Callable[..., Tensor], like: Tensor, terms: Terms, generator: torch.Generator) -> Tensor:
    """Random numbers of a tensor's shape; a part of a batch gets what it would get in the whole."""
    start, total = terms.part or (0, like.shape[0])
    whole = draw((total, *like.shape[1:]), generator=generator, device=generator.device, dtype=torch.float32)
    return whole[start : start + like.shape[0]].to(like.device, torch.promote_types(like.dtype, torch.float32))


def _uniform(like: Tensor, terms: Terms, generator: torch.Generator) -> Tensor:
    return _drawn(torch.rand, like, terms, generator)


def _normal(like: Tensor, terms: Terms, generator: torch.Generator) -> Tensor:
    return _drawn(torch.randn, like, terms, generator)


_BY_NAME: Mapping[str, type[Likelihood]] = {
    "categorical": Categorical,
    "gaussian": Gaussian,
    "bernoulli": Bernoulli,
}


def resolve(likelihood: "str | Likelihood", **options: Any) -> Likelihood:
    """A likelihood from its name and options, or the object itself.

    >>> resolve("categorical", ignore_index=0).ignore_index
    0
    """
    if isinstance(likelihood, Likelihood):
        if options:
            raise InputError(
                describe(
                    f"a likelihood object and the options {', '.join(options)}",
                    "options inside the object",
                    f"use {type(likelihood).__name__}({', '.join(f'{k}=…' for k in options)})",
                )
            )
        return likelihood
    if likelihood not in _BY_NAME:
        raise NameLookupError(unknown("likelihood", likelihood, _BY_NAME))
    cls = _BY_NAME[likelihood]
    known = [name for name in cls.__dataclass_fields__ if name != "name"]  # type: ignore[attr-defined]
    for option in options:
        if option not in known:
            raise InputError(
                describe(
                    f"option {option!r} for likelihood {likelihood!r}",
                    f"one of: {', '.join(known) or 'none'}",
                    nearest(option, known),
                )
            )
    return cls(**options)
