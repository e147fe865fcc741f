"""A small network that learns CIFAR-10 in seconds: fixed whitening, three groups of two convolutions, a scaled head.

Its plan is that of airbench94 (Jordan 2024, "94% on CIFAR-10 in 3.29 seconds on a single GPU"), in code of our own:
widths 64, 256, 256, GELU, batch norm with a bias alone, convolutions that begin as the identity on some channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (64, 256, 256)
WHITENED = 2
"""Side of the patches that are whitened."""
RIDGE = 5e-4


class Whitening(nn.Module):
    """The directions of small patches, each divided by its standard deviation, and their negatives; not trained."""

    weight: Tensor

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        patches = F.unfold(images, WHITENED).transpose(1, 2).flatten(0, 1)  # [positions, 3 · 4]
        eigenvalues, directions = torch.linalg.eigh(patches.T.cov())
        weight = (directions / (eigenvalues + RIDGE).sqrt()).T.reshape(-1, images.shape[1], WHITENED, WHITENED)
        self.register_buffer("weight", torch.cat([weight, -weight]).contiguous(memory_format=torch.channels_last))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(F.conv2d(x, self.weight))


class Norm(nn.BatchNorm2d):
    """Batch norm with a bias alone, whose averages are short: an epoch has fifty steps."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, momentum=0.4)
        self.weight.requires_grad_(False)


class Group(nn.Module):
    """Two convolutions, with pooling after the first."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(c, o, 3, padding=1, bias=False) for c in (i, o))
        self.norm1, self.norm2 = Norm(o), Norm(o)
        for conv in (self.conv1, self.conv2):
            nn.init.dirac_(conv.weight.detach()[: conv.in_channels])

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.norm2(self.conv2(x)))


class Network(nn.Module):
    """Logits ``[N, 10]``."""

    def __init__(self, images: Tensor, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__()
        self.whitening = Whitening(images)
        sizes = (len(self.whitening.weight), *widths)
        self.groups = nn.Sequential(*(Group(i, o) for i, o in zip(sizes, widths, strict=False)))
        self.head = nn.Linear(widths[-1], 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.groups(self.whitening(x)).amax((2, 3))) / 9
