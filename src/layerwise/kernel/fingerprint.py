"""`Fingerprint`: whether the tensors of a model still hold what they held.

A Jacobian runs its model when it is asked, and the model may have been trained since. Versions of tensors do not tell:
writing through ``.data`` leaves them as they are. So the numbers themselves are summed up, as bits, in one integer a
tensor:

    h = Σ_r u_r (Σ_c w_c b_rc mod 2³²) mod 2⁶⁴,   bits b in rows of 256, odd weights w and u

Integers, because sums of them are the same in any order, and no change is too small for them. Odd weights, because a
single entry that has changed then changes its row's sum, and a single row that has changed changes h, for certain;
other changes escape with probability 2⁻³¹.

It costs one pass over the parameters when the Jacobian is made and whenever it runs its model: 0.6 to 1.2 ms a million
of them on one core, and 25 µs a tensor. Nothing is kept but h (a copy to compare with would be as large as the model,
and no faster). On a GPU it is a dozen launches and two for every 4 million entries, without a synchronization: the
comparison is looked at with the other checks of that run.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from layerwise.foundations.device import sent
from layerwise.layers.capture.model_call import renormed

ROW = 256
ROWS = 2**14
"""That are weighted at a time: 16 MiB."""
ALONE = 2**18
"""From so many entries on a tensor is not put together with others."""
Kind = tuple[torch.Size, torch.dtype, torch.device, int]


def held_by(model: nn.Module) -> dict[str, Tensor]:
    """What the outputs of a model depend on: parameters, frozen ones too, and buffers of real numbers.

    Not weights that the forward itself rescales in place (embeddings with ``max_norm``).
    """
    rescaled = {id(p) for p in renormed(model.modules())}
    parameters = {name: p for name, p in model.named_parameters() if id(p) not in rescaled and not is_lazy(p)}
    real = (torch.is_floating_point, torch.is_complex)
    # A buffer is copied while the model runs, and the version of a copy tells nothing: only those with bits.
    buffers = {name: b for name, b in model.named_buffers() if _is_plain(b) and any(is_real(b) for is_real in real)}
    return {name: t for name, t in (parameters | buffers).items() if t.device.type != "meta"}


class Fingerprint:
    """Of named tensors, now.

    >>> w = torch.zeros(3)
    >>> before = Fingerprint({"w": w})
    >>> w.data[1] = 1e-30
    >>> changed, names = before.compare({"w": w})
    >>> names[int(changed[0].nonzero())]
    'w'
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.kinds = {name: _kind(t) for name, t in tensors.items()}
        self.sums = {device: _sums(list(some.values())) for device, some in _by_device(tensors).items()}

    def compare(self, tensors: Mapping[str, Tensor]) -> tuple[list[Tensor], list[str]]:
        """Which tensors have changed: flags on each device, not waited for, and names in their order.

        A tensor of another shape, type or device is named alone, with a flag of the host.
        """
        for name in dict.fromkeys((*self.kinds, *tensors)):
            if name not in tensors or name not in self.kinds or self.kinds[name] != _kind(tensors[name]):
                return [torch.ones(1, dtype=torch.bool)], [name]
        groups = _by_device(tensors)
        flags = [_sums(list(some.values())) != self.sums[device] for device, some in groups.items()]
        return flags, [name for some in groups.values() for name in some]


def _by_device(tensors: Mapping[str, Tensor]) -> dict[torch.device, dict[str, Tensor]]:
    found: dict[torch.device, dict[str, Tensor]] = {}
    for name, t in tensors.items():
        found.setdefault(t.device, {})[name] = t
    return found


def _is_plain(t: Tensor) -> bool:
    return type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and not t.is_quantized


def _kind(t: Tensor) -> Kind:
    """Of tensors whose bits cannot be had, the version is all there is."""
    return t.shape, t.dtype, t.device, 0 if _is_plain(t) else t._version


def _bits(t: Tensor) -> Int[Tensor, "b"]:
    """The entries as integers of 32 bits, one or two for each."""
    if not _is_plain(t):
        return torch.zeros(0, dtype=torch.int32, device=t.device)
    t = t.detach()
    if t.dtype == torch.float32 and t.is_contiguous():  # the usual, in fewer steps
        return t.view(torch.int32).view(-1)
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.resolve_neg()
    t = t.contiguous().as_strided((t.numel(),), (1,))  # strides of single entries may be anything
    size = t.element_size()
    return t.view(torch.int32) if size >= 4 else t.view(torch.int16 if size == 2 else torch.int8).to(torch.int32)


@cache
def _weights(device: torch.device) -> Int[Tensor, "ROW"]:
    w = torch.randint(-(2**31), 2**31, (ROW,), dtype=torch.int32, generator=torch.Generator().manual_seed(0)) | 1
    return sent(w, device)


def _row_sums(bits: Int[Tensor, "b"]) -> list[Int[Tensor, "r"]]:
    """``Σ_c w_c b_rc`` of whole rows, some at a time."""
    w = _weights(bits.device)
    return [(rows * w).sum(1, dtype=torch.int32) for rows in bits.view(-1, ROW).split(ROWS)]


def _sums(tensors: Sequence[Tensor]) -> Int[Tensor, "n"]:
    """h of each tensor of one device."""
    device = tensors[0].device
    nothing = torch.zeros(ROW, dtype=torch.int32, device=device)
    sums: list[Tensor] = []
    counts, waiting = [], list[Tensor]()

    def settle() -> None:
        if waiting:
            sums.extend(_row_sums(torch.cat(waiting)))
            waiting.clear()

    for t in tensors:
        bits = _bits(t)
        whole, rest = divmod(bits.numel(), ROW)
        counts.append(whole + (rest > 0))
        if bits.numel() >= ALONE:
            settle()
            sums.extend(_row_sums(bits[: whole * ROW]))
            bits = bits[whole * ROW :]
        waiting.append(bits)
        if rest:
            waiting.append(nothing[rest:])  # up to a whole row
    settle()
    rows = torch.cat(sums)
    bounds = torch.tensor([0, *counts]).cumsum(0)
    total = torch.zeros(len(rows) + 1, dtype=torch.int64, device=device)
    total[1:] = (rows * _row_weights(len(rows), device)).cumsum(0)
    return total[sent(bounds, device)].diff()


def _row_weights(n: int, device: torch.device) -> Int[Tensor, "n"]:
    """Odd numbers without a pattern: a product, its high bits mixed into the low ones, a product (SplitMix)."""
    u = torch.arange(1, n + 1, device=device) * -7046029254386353131
    u = (u ^ (u >> 31)) * -4658895280553007687
    return u | 1


def first_changed(flags: Iterable[Tensor], names: Sequence[str]) -> str:
    """The name of the first that has changed; synchronizes with the devices."""
    return names[[bad for some in flags for bad in some.tolist()].index(True)]
