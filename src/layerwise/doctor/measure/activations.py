"""What happens between the layers: dead and saturated units, collapsed attention, the size of signals.

Nonlinearities are seen where they are called, as modules or as functions, by a `TorchFunctionMode` in a forward
without gradients.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from layerwise.doctor.measurements import Attention, Signal, Site
from layerwise.foundations.types import Tree, leaves

FLAT = 0.05
"""A unit is flat at an example where its derivative is below this part of the largest one possible."""
MOSTLY = 0.75
"""A unit that is flat on this part of the data is saturated."""
COLLAPSED = 0.1
"""Entropy of attention, over that of uniform attention, below which a head is collapsed."""
MASKED = -1e30
"""Scores below this are masked."""
FEW_KEYS = 8
"""Positions that see fewer keys say nothing of collapse."""

_NAMES = {
    "relu": 1.0,
    "relu_": 1.0,
    "relu6": 1.0,
    "leaky_relu": 1.0,
    "elu": 1.0,
    "selu": 1.05,
    "gelu": 1.0,
    "silu": 1.0,
    "softplus": 1.0,
    "mish": 1.0,
    "sigmoid": 0.25,
    "sigmoid_": 0.25,
    "tanh": 1.0,
    "tanh_": 1.0,
    "hardtanh": 1.0,
    "hardsigmoid": 1 / 6,
    "hardswish": 1.0,
    "clamp_min": 1.0,
}
"""Nonlinearities, and the largest derivative of each."""
_BOUNDED = {"sigmoid", "tanh", "hardtanh", "hardsigmoid"}
"""Those that saturate; the others are off where they are flat."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass
class _SiteSums:
    module: str
    function: str
    place: int
    peak: Tensor
    """Largest derivative of every unit."""
    flat: Tensor
    total: Tensor
    count: int = 0


@dataclass
class _SignalSums:
    module: str
    kind: str
    place: int
    square_in: float = 0.0
    square_out: float = 0.0
    varying: float = 0.0
    """Sums over batches of means: divided by their number at the end."""
    batches: int = 0
    finite: bool = True


@dataclass
class ActivationWatch(TorchFunctionMode):
    """Collects measurements while the model runs inside ``with watch.running(model):``."""

    sites: dict[tuple[str, str, int], _SiteSums] = field(default_factory=dict)
    signals: dict[str, _SignalSums] = field(default_factory=dict)
    heads: dict[str, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._stack: list[str] = []
        self._calls: dict[tuple[str, str], int] = {}
        self._channels_first = False
        self._order = 0

    @contextmanager
    def running(self, model: nn.Module) -> Iterator["ActivationWatch"]:
        """Hooks on every module, removed at the end; call the model once inside."""
        self._calls.clear()
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda _m, _x, name=name: self._stack.append(name)))
            handles.append(module.register_forward_hook(self._after(name)))
        try:
            with self:
                yield self
        finally:
            self._stack.clear()
            for handle in handles:
                handle.remove()

    # --- nonlinearities ------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called for every function of torch that the model calls."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _NAMES and args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            if name != "clamp_min" or _is_zero(args[1:], kwargs):
                self._nonlinearity(name.rstrip("_"), func, args, kwargs)
        elif name in SCORES and len(args) >= 2:
            scores = SCORES[name](args, kwargs)
            if scores is not None:
                self._attention(scores)
        result = func(*args, **kwargs)
        if name == "softmax" and args and isinstance(args[0], Tensor) and _square_scores(args[0]):
            self._attention(args[0][:2].detach().float())
        return result

    def _nonlinearity(self, name: str, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
        with torch.enable_grad():
            z = args[0].detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(func(z.clone(), *args[1:], **kwargs).sum(), z)
        self._slopes(name, slope)

    def _slopes(self, name: str, slope: Tensor) -> None:
        slope = slope.abs().float()
        axis = 1 if slope.ndim > 3 or (slope.ndim == 3 and self._channels_first) else slope.ndim - 1
        units = slope.movedim(axis, -1).reshape(-1, slope.shape[axis])
        module = next((name for name in reversed(self._stack)), "")
        number = self._calls.get((module, name), 0)
        self._calls[module, name] = number + 1
        key = (module, name, number)
        if key not in self.sites:
            zero = units.new_zeros(units.shape[1])
            self.sites[key] = _SiteSums(module, name, self._tick(), zero.clone(), zero.clone(), zero.clone())
        site = self.sites[key]
        if site.peak.shape != units.shape[1:]:  # a model whose widths depend on the batch
            return
        site.peak = torch.maximum(site.peak, units.amax(0))
        site.flat += (units < FLAT * _NAMES[name]).sum(0)
        site.total += units.sum(0)
        site.count += units.shape[0]

    def _attention(self, scores: Tensor) -> None:
        """Entropy of the softmax of ``[..., heads, queries, keys]``, of queries that see several keys."""
        seen = (scores > MASKED).sum(-1)
        wide = seen >= FEW_KEYS
        if not bool(wide.any()):
            return
        p = F.softmax(scores, -1)
        entropy = -(p.clamp_min(1e-30).log() * p).sum(-1) / seen.clamp_min(2).float().log()
        kept = torch.where(wide, entropy, torch.nan)
        heads = kept.movedim(-2, 0).reshape(scores.shape[-3], -1) if scores.ndim > 3 else kept.reshape(1, -1)
        module = self._stack[-1] if self._stack else ""
        self.heads.setdefault(module, []).append(heads.nanmean(-1))

    # --- signals -------------------------------------------------------------------------------------------------

    def _tick(self) -> int:
        self._order += 1
        return self._order

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._stack:
                self._stack.pop()
            with torch._C.DisableTorchFunction():
                self._see(name, module, inputs, output)

        return hook

    def _see(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        x = next((t for t in leaves(list(inputs)) if t.is_floating_point()), None)
        y = next((t for t in leaves(output) if t.is_floating_point()), None)
        if isinstance(module, _CONVOLUTIONS):
            self._channels_first = True
        elif isinstance(module, nn.Linear | nn.LayerNorm | nn.Embedding):
            self._channels_first = False
        if isinstance(module, nn.RNNBase) and y is not None:
            self._slopes("tanh", 1 - y.detach().square())
        owns = any(p is not None for p in module._parameters.values())
        if y is None or (not owns and not (name == "" or _broken(y))):
            return
        if name not in self.signals:
            self.signals[name] = _SignalSums(name, type(module).__name__, self._tick())
        sums = self.signals[name]
        sums.finite = sums.finite and not _broken(y)
        sums.square_out += _square(y)
        sums.batches += 1
        if x is not None:
            sums.square_in += _square(x)
            sums.varying += _varying(x)

    # --- results -------------------------------------------------------------------------------------------------

    def measured_sites(self) -> tuple[Site, ...]:
        """Nonlinearities in the order of their calls."""
        found = []
        for site in self.sites.values():
            dead = site.peak < 1e-6
            flat = site.flat / max(site.count, 1)
            saturated = (flat >= MOSTLY) if site.function in _BOUNDED else torch.zeros_like(dead)
            found.append(
                Site(
                    site.module,
                    site.function,
                    site.place,
                    len(site.peak),
                    float((dead & ~saturated).float().mean()),
                    float(saturated.float().mean()),
                    float(site.total.mean() / max(site.count, 1)),
                )
            )
        return tuple(sorted(found, key=lambda one: one.place))

    def measured_attention(self) -> tuple[Attention, ...]:
        """Softmax over positions."""
        found = []
        for module, parts in self.heads.items():
            entropy = torch.stack([part for part in parts if part.shape == parts[0].shape]).mean(0)
            collapsed = float((entropy < COLLAPSED).float().mean())
            found.append(Attention(module, len(entropy), collapsed, float(entropy.mean())))
        return tuple(found)

    def measured_signals(self, model: nn.Module) -> tuple[Signal, ...]:
        """Modules with parameters in the order of their calls."""
        modules = dict(model.named_modules())
        found = []
        for sums in self.signals.values():
            n = max(sums.batches, 1)
            square = sums.square_in / n
            signal = Signal(
                sums.module,
                sums.kind,
                sums.place,
                _root(square),
                _root(sums.square_out / n),
                sums.varying / n / square if square > 0 else math.nan,
                sums.finite,
            )
            found.append(replace(signal, twins=twins(modules[sums.module])))
        return tuple(sorted(found, key=lambda one: one.place))


def twins(module: nn.Module) -> float:
    """Part of the rows of a module's weight (with their biases) that are copies of another row.

    >>> layer = nn.Linear(3, 4)
    >>> twins(layer)
    0.0
    >>> layer.requires_grad_(False).weight[1], layer.bias[1] = layer.weight[0], layer.bias[0]
    >>> twins(layer)
    0.5
    """
    if isinstance(module, nn.Embedding | nn.EmbeddingBag | nn.modules.batchnorm._BatchNorm):
        return 0.0
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or weight.ndim < 2 or weight.shape[0] < 2:
        return 0.0
    rows = weight.detach().flatten(1)
    if bias is not None and bias.shape == rows.shape[:1]:
        rows = torch.cat([rows, bias.detach().unsqueeze(1)], 1)
    _, counts = torch.unique(rows, dim=0, return_counts=True)
    return float(counts[counts > 1].sum()) / len(rows)


def _is_zero(rest: tuple, kwargs: dict[str, Any]) -> bool:
    bound = rest[0] if rest else kwargs.get("min", 0)
    return not isinstance(bound, Tensor) and bound == 0


def _scores(args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """What `scaled_dot_product_attention` takes the softmax of, for the first two examples; masked: −∞."""
    q, k = (t[:2].detach().float() for t in args[:2])
    if q.ndim < 3 or k.shape[-3] != q.shape[-3]:  # grouped queries
        return None
    scale = kwargs.get("scale") or 1 / math.sqrt(q.shape[-1])
    scores = q @ k.mT * scale
    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    if kwargs.get("is_causal", len(args) > 5 and args[5]):
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    elif isinstance(mask, Tensor):
        mask = mask[:2] if mask.ndim == scores.ndim and mask.shape[0] > 1 else mask
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores


def _packed_scores(args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """The same for `multi_head_attention_forward`, whose own calls a mode does not see; None: projections apart."""
    query, key, width, heads, weight = args[0], args[1], args[3], args[4], args[5]
    if weight is None or query.ndim != 3 or query.shape[-1] != width:
        return None
    bias = args[6] if args[6] is not None else weight.new_zeros(3 * width)
    q = F.linear(query[:, :2].detach(), weight[:width], bias[:width])
    k = F.linear(key[:, :2].detach(), weight[width : 2 * width], bias[width : 2 * width])
    q, k = (t.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3).float() for t in (q, k))  # N H L d
    mask = kwargs.get("attn_mask")
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if isinstance(mask, Tensor) and mask.ndim == 2:
        scores = scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores


SCORES: dict[str, Callable[[tuple, dict[str, Any]], Tensor | None]] = {
    "scaled_dot_product_attention": _scores,
    "multi_head_attention_forward": _packed_scores,
}
"""Functions that attend, and how to get what they take the softmax of."""


def _square_scores(scores: Tensor) -> bool:
    """Whether a softmax is one over positions: as many keys as queries."""
    return scores.is_floating_point() and scores.ndim >= 3 and scores.shape[-2] == scores.shape[-1]


def _broken(t: Tensor) -> bool:
    return not bool(torch.isfinite(t).all())


def _square(t: Tensor) -> float:
    return float(t.detach().float().square().mean())


def _root(value: float) -> float:
    return math.sqrt(value) if value >= 0 else math.nan


def _varying(x: Tensor) -> float:
    """Mean square of what differs between the rows of a batch; NaN for one row that was expanded (learned queries)."""
    if x.ndim < 2 or x.shape[0] < 2 or x.stride(0) == 0:
        return math.nan
    x = x.detach().float()
    return float((x - x.mean(0)).square().mean())


def first_broken(signals: Iterable[Signal]) -> tuple[str, ...]:
    """Modules whose output is not finite, the first one first."""
    return tuple(signal.module for signal in signals if not signal.finite)


def run_watched(model: nn.Module, watch: ActivationWatch, call: Callable[[nn.Module, Tree], Any], x: Tree) -> None:
    """One forward under the watch, without gradients."""
    with torch.no_grad(), watch.running(model):
        call(model, x)
