"""CIFAR-10 on the device that trains on it, cropped and mirrored there."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from layerwise.data import cifar10

PAD = 2
"""Pixels by which a crop may be shifted, beyond an edge that is mirrored."""


class Images:
    """Normalised images ``[N, 3, H, W]`` and their labels, for training and for the test."""

    def __init__(self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], device: str) -> None:
        x, x_test = train[0].to(device), test[0].to(device)
        mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
        # what a convolution under autocast would round to anyway
        self.dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        x, x_test = ((pixels - mean) / std for pixels in (x, x_test))
        self.first = x[:5000].clone()  # for the whitening, in float32
        self.padded = F.pad(x, (PAD,) * 4, mode="reflect").to(self.dtype)
        self.test = x_test.to(self.dtype).contiguous(memory_format=torch.channels_last)
        self.y, self.y_test = train[1].to(device), test[1].to(device)
        self.side, self.device = x.shape[-1], device

    @property
    def count(self) -> int:
        return len(self.y)

    def epoch(self, batch: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """All images once, in another order, crops and mirror images by chance; what does not fill a batch is left out.

        One gather makes the crops of the whole epoch, channels last; nothing is waited for.
        """
        n, side = self.count, self.side
        order = torch.randperm(n, generator=generator, device=self.device)
        shifts = torch.randint(2 * PAD + 1, (2, n, 1), generator=generator, device=self.device)
        mirrored = torch.rand(n, 1, generator=generator, device=self.device) < 0.5
        place = torch.arange(side, device=self.device)
        rows, columns = place + shifts[0], torch.where(mirrored, side - 1 - place, place) + shifts[1]
        x = self.padded[order[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        y = self.y[order]
        for start in range(0, n - batch + 1, batch):
            yield x[start : start + batch], y[start : start + batch]


@dataclass(frozen=True)
class Data:
    """What final runs learn from, tested on the test images; trials hold out the last tenth of it to be judged by."""

    trials: Images
    final: Images

    @classmethod
    def of(cls, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], device: str) -> "Data":
        kept = len(train[1]) - len(train[1]) // 10
        first, last = ((train[0][part], train[1][part]) for part in (slice(kept), slice(kept, None)))
        return cls(Images(first, last, device), Images(train, test, device))

    @classmethod
    def read(cls, device: str, limit: int | None) -> "Data":
        """From the folder that LAYERWISE_DATA names."""
        train, test = (cifar10(split, limit=limit, progress=False) for split in ("train", "test"))
        return cls.of((train.x, train.y), (test.x, test.y), device)

    @classmethod
    def made_up(cls, device: str, count: int = 256, side: int = 16) -> "Data":
        """Ten colours under noise, where no data is at hand."""
        generator = torch.Generator().manual_seed(0)
        y = torch.randint(10, (2 * count,), generator=generator)
        x = torch.randn(2 * count, 3, side, side, generator=generator)
        x += torch.randn(10, 3, 1, 1, generator=generator)[y]
        return cls.of((x[:count], y[:count]), (x[count:], y[count:]), device)
