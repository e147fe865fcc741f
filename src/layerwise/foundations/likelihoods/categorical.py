"""Softmax cross-entropy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from layerwise.foundations.device import Readback, drawn, sent
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.likelihoods.likelihood import Likelihood, Terms, basis
from layerwise.foundations.types import statistics_dtype


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
        if self.weight is not None and self.weight.device.type == "cpu":  # elsewhere `ask` looks at it
            self._check_weights(bool(_are_weights(self.weight)))

    def standardize(self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor]) -> Terms:
        """Logits with the classes on their axis, labels without it."""
        return self._standard(f, y, mask, arrange, self.ask(y, mask)).without_hints()

    def ask(self, y: Any, mask: Tensor | None) -> Readback | None:
        """The smallest and the largest label, how many are ignored, and how many positions count."""
        if not _are_labels(y) or not y.numel():
            return None
        ignored = y == self.ignore_index
        low, high = torch.aminmax(y.masked_fill(ignored, 0).flatten())
        counts = ~ignored if mask is None or mask.shape != y.shape else mask.bool() & ~ignored
        asked = [low.long(), high.long(), ignored.sum(), counts.sum()]
        if self.weight is not None and self.weight.device == y.device:
            asked.append(_are_weights(self.weight).long())
        return Readback(torch.stack(asked))

    def standardize_asked(
        self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor], asked: Readback | None
    ) -> Terms:
        """The same, without a synchronization after the forward."""
        if type(self).standardize is not Categorical.standardize:  # a subclass reads outputs its own way
            return self.standardize(f, y, mask, arrange)
        return self._standard(f, y, mask, arrange, asked)

    def _standard(
        self, f: Tensor, y: Any, mask: Tensor | None, arrange: Callable[[Tensor], Tensor], asked: Readback | None
    ) -> Terms:
        axis = self._class_axis(f, y)
        logits = f.movedim(axis, -1)
        lead = logits.shape[:-1]
        f_std = arrange(logits)
        positions = tuple(f_std.shape[1:-1])
        f_std = f_std.reshape(f_std.shape[0], -1, f_std.shape[-1])
        n, s, c = f_std.shape
        labels = keep = kept = None
        if y is not None:
            ignored, kept = self._check_labels(y, lead, c, asked)
            labels = arrange(y.unsqueeze(-1)).reshape(n, s)
            keep = labels != self.ignore_index if ignored else None
        if mask is not None:
            if mask.shape != lead:
                raise InputError(
                    describe(
                        f"a mask of shape {tuple(mask.shape)}",
                        f"shape {tuple(lead)}",
                        "give one entry for each position",
                    )
                )
            given = arrange(mask.unsqueeze(-1)).reshape(n, s).bool()
            keep = given if keep is None else keep & given
        if keep is not None and labels is not None:
            labels = torch.where(keep, labels, 0)
        weight, unweighted = self._term_weight(f_std, labels, keep), self.weight is None and keep is None
        kept = None if keep is None else kept
        return Terms(f_std, labels, weight, keep, positions, kept=kept, unweighted=unweighted)

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

    def _check_labels(self, y: Any, lead: torch.Size, classes: int, asked: Readback | None) -> tuple[int, int]:
        """How many labels are ignored, and how many positions count; an error where a label is no class."""
        if not _are_labels(y):
            kind = f"dtype {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
            raise InputError(describe(f"a target of {kind}", "integer class labels", "call y.long()"))
        if y.shape != lead:
            raise InputError(
                describe(f"a target of shape {tuple(y.shape)}", f"shape {tuple(lead)}", "give one label a position")
            )
        if asked is None:
            return 0, 0
        low, high, ignored, kept, *weights = asked.read()
        self._check_weights(all(weights))
        if low < 0 or high >= classes:
            valid = (y == self.ignore_index) | ((y >= 0) & (y < classes))
            raise InputError(
                describe(
                    f"label {int(y[~valid][0])}",
                    f"labels 0 … {classes - 1}, or ignore_index={self.ignore_index}",
                    "correct the labels or the model's number of outputs",
                )
            )
        return ignored, kept

    @staticmethod
    def _check_weights(fine: bool) -> None:
        if not fine:
            raise InputError(describe("class weights that are negative or not finite", "weights ≥ 0", "correct them"))

    def _class_weights(self, f: Tensor) -> Tensor:
        assert self.weight is not None
        if self.weight.shape != f.shape[-1:]:
            raise InputError(
                describe(
                    f"class weights of shape {tuple(self.weight.shape)}",
                    f"shape ({f.shape[-1]},)",
                    "give one for each class",
                )
            )
        return sent(self.weight, f.device).to(f.dtype)

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
        column = torch.where(below, -p / after_j.clamp_min(tiny), basis(p, start, stop)[:, None, None])
        scale = (terms.weight.unsqueeze(-1) * p_j * after_j / tail_j.clamp_min(tiny)).sqrt()
        return scale * column

    @property
    def samples_half(self) -> bool:
        """Where classes have no weights, which would be rounded as the output is."""
        return type(self).sample is Categorical.sample and self.weight is None

    def sample(self, terms: Terms, generator: torch.Generator) -> Float[Tensor, "N S C"]:
        """``√(m w) (p − e_ŷ)`` with ŷ drawn from the model, in the output's type, to which p is rounded once."""
        p = terms.f.detach().softmax(-1)
        # Inverse-CDF: two draws from one generator give the same label whatever the batch's chunking, and but for
        # rounding whatever its device.
        like = p[..., :1].to(statistics_dtype(p.dtype))
        labels, total = _drawn_from(p, drawn(torch.rand, like, generator, terms.part))
        if p.dtype.itemsize >= 4:
            v = p.scatter_add_(-1, labels, -torch.ones_like(labels, dtype=p.dtype))  # p is ours, and may be gigabytes
        else:  # p_y − 1 as the others have it: where p_y is nearly 1 its own rounding would be all that is left
            v = p.scatter_(-1, labels, (p.gather(-1, labels) - total).to(p.dtype))
        return v if terms.unweighted else v.mul_(terms.weight.sqrt().unsqueeze(-1))

    def hessian_product(self, terms: Terms, u: Float[Tensor, "*B N S C"]) -> Float[Tensor, "*B N S C"]:
        """``m w (p ⊙ u − p pᵀu)``."""
        p = terms.f.detach().softmax(-1)
        return terms.weight.unsqueeze(-1) * p * (u - (p * u).sum(-1, keepdim=True))


def _are_labels(y: Any) -> TypeGuard[Tensor]:
    return isinstance(y, Tensor) and not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)


def _are_weights(t: Tensor) -> Tensor:
    return (torch.isfinite(t) & (t >= 0)).all()


BLOCK = 256
"""Classes whose probabilities are added up together, where there are many."""


def inverse_cdf(p: Float[Tensor, "*lead C"], u: Float[Tensor, "*lead 1"]) -> Int[Tensor, "*lead 1"]:
    """The class in which ``Σ_{i ≤ c} p_i`` reaches u, or of a p in half precision ``u Σ_i p_i``.

    Sums are in float64. Of many classes only the sums of blocks are made, and those within the one block that is met:
    one pass over p. A GPU makes the sums of blocks in float32, since it would copy p to float64 for them.

    >>> inverse_cdf(torch.tensor([0.25, 0.5, 0.25]), torch.tensor([0.6])).tolist()
    [1]
    """
    return _drawn_from(p, u)[0]


def _drawn_from(p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and ``Σ_i p_i``."""
    u, C = u.to(torch.float64), p.shape[-1]
    if C <= 4 * BLOCK:
        cdf = p.to(torch.float64).cumsum(-1)
        total = cdf[..., -1:]
        return _reached(cdf, u * total if p.dtype.itemsize < 4 else u).clamp_max(C - 1), total
    whole = C - C % BLOCK
    precise = torch.float32 if p.is_cuda and p.dtype != torch.float64 else torch.float64
    sums = p[..., :whole].unflatten(-1, (-1, BLOCK)).sum(-1, dtype=precise).to(torch.float64)
    if whole < C:
        sums = torch.cat([sums, p[..., whole:].to(torch.float64).sum(-1, keepdim=True)], -1)
    ends = sums.cumsum(-1)
    total = ends[..., -1:]
    u = u * total if p.dtype.itemsize < 4 else u  # whose rounded entries do not add up to 1
    block = _reached(ends, u).clamp_max(sums.shape[-1] - 1)
    start = ends.gather(-1, block) - sums.gather(-1, block)
    classes = block * BLOCK + torch.arange(BLOCK, device=p.device)
    inside = p.gather(-1, classes.clamp_max(C - 1)).to(torch.float64) * (classes < C)
    return (block * BLOCK + _reached(start + inside.cumsum(-1), u)).clamp_max(C - 1), total


def _reached(cdf: Tensor, u: Tensor) -> Tensor:
    return (cdf < u).sum(-1, keepdim=True)
