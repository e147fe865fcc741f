"""Data as batches: a pair ``(x, y)``, or any iterable of pairs such as a `DataLoader`."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.progress import Progress, Silent
from layerwise.foundations.types import leaves, map_leaves
from layerwise.layers.capture.labelled import inputs_and_targets
from layerwise.layers.capture.recorder import Batch

_LABEL_KEYS = ("labels", "label", "y", "target", "targets")


def is_batch(data: Any) -> bool:
    """Whether `data` is one batch rather than an iterable of batches."""
    if isinstance(data, Tensor | Mapping):
        return True
    if not isinstance(data, tuple | list) or not 1 <= len(data) <= 3:
        return False
    first, *rest = data
    has_input = isinstance(first, Tensor) or (rest and next(leaves(first), None) is not None)
    return bool(has_input) and all(r is None or isinstance(r, Tensor) for r in rest)


def as_batch(item: Any, number: int, model: nn.Module | None = None) -> Batch:
    """One batch: ``(x, y)``, ``(x, y, mask)``, ``[x]``, a tensor, or a mapping with its labels among the keys.

    Labels among the keys are read as the loss of `model` reads them.
    """
    if isinstance(item, Tensor):
        return Batch(item, None, None, number)
    if isinstance(item, Mapping):
        key = next((k for k in _LABEL_KEYS if k in item), None)
        inputs = {k: v for k, v in item.items() if k != key}
        labels = None if key is None else item[key]
        if key == "labels" and model is not None:
            inputs, labels = inputs_and_targets(model, inputs, labels)
        return Batch(inputs, labels, None, number)
    if isinstance(item, tuple | list) and 1 <= len(item) <= 3:
        x, y, mask = (*item, None, None)[:3]
        if next(leaves(x), None) is not None:
            return Batch(x, y, mask, number)
    raise InputError(
        describe(
            f"batch {number} of type {type(item).__name__}",
            "(x, y), (x, y, mask), or a mapping with labels",
            "check what the loader yields",
        )
    )


class Source:
    """The data, iterated as often as a structure needs; later passes must see the same batches."""

    def __init__(self, data: Any, progress: Progress | None = None, model: nn.Module | None = None) -> None:
        self.model = model
        if data is None:
            raise InputError(describe("data=None", "a batch (x, y) or an iterable of batches", "give the data"))
        self.single = is_batch(data)
        self.data: Iterable[Any] = [data] if self.single else data
        if not self.single and not isinstance(data, Iterable):
            raise InputError(
                describe(
                    f"data of type {type(data).__name__}",
                    "a batch (x, y) or an iterable of batches",
                    "wrap it",
                )
            )
        self.progress = progress or Silent()
        self.passes = 0
        self.repeats = False
        """Whether later passes will come, which must see the same batches."""
        self._seen: list[float] = []

    @property
    def can_repeat(self) -> bool:
        """Whether the data can be iterated again (a generator cannot)."""
        return not isinstance(self.data, Iterator)

    def require_passes(self, count: int, why: str) -> None:
        """Refuse a generator where more than one pass is needed."""
        self.repeats = self.repeats or count > 1
        if count > 1 and not self.can_repeat:
            raise InputError(
                describe(
                    f"a generator ({type(self.data).__name__}) for {why}",
                    f"data that can be iterated {count} times",
                    "pass a DataLoader or a list of batches",
                )
            )

    def restart(self, why: str) -> None:
        """Begin anew with a pass that could not be finished."""
        if not self.can_repeat:
            raise InputError(
                describe(
                    f"a generator ({type(self.data).__name__}) {why}",
                    "data that can be iterated again, or a larger first batch",
                    "pass a DataLoader or a list of batches, or put the small batch last",
                )
            )
        self._seen.clear()

    def batches(self, description: str) -> Iterator[Batch]:
        """All batches of one pass."""
        total = len(self.data) if hasattr(self.data, "__len__") else None  # type: ignore[arg-type]
        number = -1
        shown = self.data if self.single else self.progress.track(self.data, description, total)
        for number, item in enumerate(shown):
            batch = as_batch(map_leaves(usable, item), number, self.model)
            self._check_same(batch)
            yield batch
        if number < 0:
            raise InputError(describe("data without a single batch", "at least one batch", "check the loader"))
        if self.repeats and self.passes and not self.single and number + 1 < len(self._seen):
            self._differs(number + 1)
        self.passes += 1

    def _check_same(self, batch: Batch) -> None:
        if self.single or not self.repeats:
            return
        tensors = (t.detach() for t in leaves((batch.x, batch.y)) if t.device.type != "meta")
        mark = sum(_mark(t) for t in tensors)
        if self.passes == 0:
            self._seen.append(mark)
            return
        if batch.number >= len(self._seen) or not _close(mark, self._seen[batch.number]):
            self._differs(batch.number)

    @staticmethod
    def _differs(number: int) -> None:
        raise InputError(
            describe(
                f"a loader whose batch {number} differs from the earlier pass",
                "the same batches in the same order at every pass",
                "use shuffle=False and no random augmentation, or pass a list of batches",
            )
        )


def _mark(t: Tensor) -> float:
    """A number that tells batches apart, also by the order of their rows."""
    if t.ndim == 0 or not t.numel():
        return float(t.sum(dtype=torch.float64))
    rows = t.flatten(1).sum(1, dtype=torch.float64) if t.ndim > 1 else t.double()
    return float(rows @ torch.linspace(1, 2, len(rows), dtype=torch.float64, device=t.device))


def usable(t: Tensor) -> Tensor:
    """A tensor that autograd may keep: not one made in inference mode."""
    return t.clone() if t.is_inference() else t


def _close(a: float, b: float) -> bool:
    if a != a and b != b:
        return True
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b), torch.finfo(torch.float32).tiny)
