"""Values of many small tensors at one moment: taken, compared and copied in a few operations, however many there are.

A ResNet has three buffers a batch norm: with operations for each of them, a GPU would wait for the host.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from layerwise.foundations.asked import Asked

LARGE = 2**20
"""Bytes."""
Kind = tuple[torch.Size, torch.dtype, torch.device]


class Snapshot:
    """What tensors hold now, to be put back into those that have changed.

    >>> a, b = torch.zeros(2), torch.ones(3)
    >>> before = Snapshot([a, b])
    >>> _ = a.add_(1)
    >>> before.put_back(), a.tolist()
    (None, [0.0, 0.0])
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._groups: list[tuple[list[Tensor], list[Kind], Tensor]] = []
        by_device: dict[torch.device, list[Tensor]] = {}
        for t in tensors:
            if _is_small(t):
                by_device.setdefault(t.device, []).append(t)
        for group in by_device.values():
            self._groups.append((group, _kinds(group), _bytes(group)))
        self._alone = [(t, t.detach().clone()) for t in tensors if not _is_small(t)]

    @torch.no_grad()
    def put_back(self) -> None:
        """Undo every change; a tensor that has kept its value is not written to, since a graph may need it."""
        for group, kinds, before in self._groups:
            if _kinds(group) != kinds or Asked((_bytes(group) != before).any()).read():
                _restore(group, kinds, before)
        for t, before in self._alone:
            if not bool(((t == before) | ((t != t) & (before != before))).all()):
                t.copy_(before)


def duplicates(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each, with a memory of its own: one may be written to while a graph needs another."""
    together = [_is_plain(t) and not t.requires_grad for t in tensors]
    copies = [torch.empty_like(t) if ok else t.clone() for t, ok in zip(tensors, together, strict=True)]
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for copy, t, ok in zip(copies, tensors, together, strict=True):
        if ok:
            alike.setdefault((t.device, t.dtype), []).append((copy, t))
    for pairs in alike.values():
        torch._foreach_copy_([copy for copy, _ in pairs], [t for _, t in pairs])  # pyright: ignore[reportPrivateImportUsage]
    return copies


def _is_plain(t: Tensor) -> bool:
    odd = t.is_quantized or t.is_conj() or t.is_neg() or t.device.type == "meta"
    return type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and not odd


def _is_small(t: Tensor) -> bool:
    """Whether it goes with the others: a large one is compared in its own memory."""
    return _is_plain(t) and t.numel() * t.element_size() <= LARGE


def _kinds(tensors: Sequence[Tensor]) -> list[Kind]:
    return [(t.shape, t.dtype, t.device) for t in tensors]


def _bytes(tensors: Sequence[Tensor]) -> Tensor:
    """All in one; as bytes, so that types mix and NaN equals itself."""
    return torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])


def _restore(tensors: Sequence[Tensor], kinds: Sequence[Kind], before: Tensor) -> None:
    start = 0
    for t, (shape, dtype, device) in zip(tensors, kinds, strict=True):
        stop = start + shape.numel() * dtype.itemsize
        former = before[start:stop]
        if (t.shape, t.dtype, t.device) != (shape, dtype, device) or not torch.equal(_bytes([t]), former):
            t.copy_(former.clone().view(dtype).view(shape))  # cloned: a part need not be aligned
        start = stop
