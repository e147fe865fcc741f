"""The truth of an entry: Jacobians of single examples by plain autograd, one backward an entry of the output.

In float64. Models that ask for float32 by name (norms, rotary angles, softmax) are given float64 too, so that what lies
between the library in float32 and this is rounding of the library's side alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from cases import Batch, trainable
from oracle import Truth, rows_of
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from zoo_entries import Entry, ZooBatch


class _Float64Throughout(TorchDispatchMode):
    """Whatever is to be made in float32, or cast to it, is made in float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextmanager
def _exactly() -> Iterator[None]:
    """Float64 wherever a model asks for float32, and attention as its formula says."""
    with sdpa_kernel(SDPBackend.MATH), _Float64Throughout():
        yield


def output(model: nn.Module, x: Any) -> Tensor:
    """Logits, or the first tensor, of a call as the input asks for."""
    out = model(**x) if isinstance(x, dict) else model(x)
    if isinstance(out, Tensor):
        return out
    return out["logits"] if "logits" in out else out[0]


class Arranged(nn.Module):
    """A model that takes its arguments by name, in float64, and returns its output, as the fuzzer's models do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **x: Any) -> Tensor:
        x = {k: v.double() if v.is_floating_point() else v for k, v in x.items()}
        with _exactly():  # a backward has the dtypes of its forward
            return output(self.model, x["x"] if list(x) == ["x"] else x)

    @staticmethod
    def batch(given: ZooBatch) -> Batch:
        """A batch for it."""
        return Batch(given.x if isinstance(given.x, dict) else {"x": given.x}, given.y, given.n)


class ZooTruth:
    """Of one entry, over all of its batches."""

    def __init__(self, entry: Entry) -> None:
        self.entry, self.model = entry, entry.model(torch.float64)
        if hasattr(self.model, "set_experts_implementation"):  # the default, one grouped product, has no float64
            self.model.set_experts_implementation("eager")

    @cached_property
    def batches(self) -> list[Truth]:
        """Outputs, Jacobian and target of every batch, each example run alone."""
        return [self._of(batch) for batch in self.entry.batches()]

    def fisher(self, estimator: str) -> Tensor:
        """1/N Σ_n over all batches."""
        total: Any = sum(truth.fisher_sum(estimator) for truth in self.batches)
        return total / sum(len(truth.z) for truth in self.batches)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each parameter lies in a flat vector."""
        found, start = {}, 0
        for name, p in trainable(self.model):
            found[name] = slice(start, start := start + p.numel())
        return found

    def _of(self, batch: ZooBatch) -> Truth:
        alone = [self._rows(batch.alone(n)) for n in range(batch.n)]
        z, J = (torch.stack([pair[i] for pair in alone]) for i in (0, 1))
        return Truth(z, J, batch.y, self.entry.likelihood, self.entry.options)

    def _rows(self, x: Any) -> tuple[Tensor, Tensor]:
        """``[S, C]`` and ``[S, C, d]`` of one example."""
        named = x if isinstance(x, dict) else {"x": x}
        f = Arranged(self.model)(**named)
        assert f.dtype == torch.float64
        J = rows_of(self.model, f)
        z = f.detach().reshape(-1, f.shape[-1])
        return z, J.reshape(*z.shape, -1)


_MADE: dict[str, ZooTruth] = {}


def truth_of(entry: Entry) -> ZooTruth:
    """Made once for all tests of a model."""
    if entry.name not in _MADE:
        _MADE[entry.name] = ZooTruth(entry)
    return _MADE[entry.name]
