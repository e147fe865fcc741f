"""Convolutional networks for small images: VGG and residual networks, with or without batch norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from layerwise.foundations.errors import NameLookupError, unknown

CLASSES = 10
RESIDUAL_GAIN = 0.2
"""Of the last convolution of a block, where there is no batch norm: a tenth of the variance that keeps ReLU's scale."""
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
VGG = {
    11: (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool"),
    19: (64, 64, "pool", 128, 128, "pool", *[256] * 4, "pool", *[512] * 4, "pool", *[512] * 4, "pool"),
}
"""Channels of the convolutions, by the layers that Simonyan and Zisserman (2015) count; theirs end in three linear."""


def convolution(fan: tuple[int, int], size: int, stride: int, gain: float, batch_norm: bool) -> list[nn.Module]:
    """A convolution whose weights are drawn from N(0, gain / fan-in), biases zero; and batch norm, if asked for."""
    layer = nn.Conv2d(*fan, size, stride, padding=size // 2, bias=not batch_norm)
    nn.init.normal_(layer.weight, std=(gain / layer.weight[0].numel()) ** 0.5)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return [layer, *([nn.BatchNorm2d(fan[1])] if batch_norm else [])]


class Block(nn.Module):
    """``ReLU(x + conv(ReLU(conv(x))))``; a convolution of 1 × 1 on the way past, where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, batch_norm: bool) -> None:
        super().__init__()
        last = 2.0 if batch_norm else RESIDUAL_GAIN
        self.inner = nn.Sequential(
            *convolution((inputs, outputs), 3, stride, 2.0, batch_norm),
            nn.ReLU(),
            *convolution((outputs, outputs), 3, 1, last, batch_norm),
        )
        changes = stride != 1 or inputs != outputs
        past = convolution((inputs, outputs), 1, stride, 1.0, batch_norm) if changes else []
        self.past = nn.Sequential(*past)

    def forward(self, x: Tensor) -> Tensor:
        """Both ways, added."""
        return functional.relu(self.past(x) + self.inner(x))


class ResNet(nn.Module):
    """Four stages of blocks at 32, 16, 8 and 4 pixels, mean over pixels, a linear layer.

    Without batch norm weights are drawn as in appendix A.3 of the thesis: N(0, 2 / fan-in) behind a ReLU, N(0, 1 /
    fan-in) where there is none, N(0, 0.2 / fan-in) in the last convolution of a block.
    """

    def __init__(self, blocks: Sequence[int] = BLOCKS[18], width: int = 64, batch_norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(*convolution((3, width), 3, 1, 1.0, batch_norm), nn.ReLU())
        stages: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(blocks):
            outputs = width << stage
            for number in range(count):
                stride = 2 if number == 0 and stage > 0 else 1
                stages.append(Block(inputs, outputs, stride, batch_norm))
                inputs = outputs
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, CLASSES)
        nn.init.normal_(self.head.weight, std=inputs**-0.5)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.blocks(self.first(x)).mean((-2, -1)))


def vgg(layers: int = 11, width: int = 64, batch_norm: bool = False) -> nn.Sequential:
    """Convolutions, pooled five times, and a linear layer; weights N(0, 2 / fan-in), first, last N(0, 1 / fan-in)."""
    modules: list[nn.Module] = []
    inputs = 3
    for entry in VGG[layers]:
        if isinstance(entry, str):
            modules.append(nn.MaxPool2d(2))
            continue
        outputs = entry * width // 64
        modules += [*convolution((inputs, outputs), 3, 1, 1.0 if inputs == 3 else 2.0, batch_norm), nn.ReLU()]
        inputs = outputs
    head = nn.Linear(inputs, CLASSES)
    nn.init.normal_(head.weight, std=inputs**-0.5)
    nn.init.zeros_(head.bias)
    return nn.Sequential(*modules, nn.Flatten(), head)


def three_convolutions(width: int = 16, batch_norm: bool = False) -> nn.Sequential:
    """For digits of 8 × 8: three convolutions, the last two with stride 2, and a linear layer."""
    sizes = ((1, width, 1, 1.0), (width, 2 * width, 2, 2.0), (2 * width, 2 * width, 2, 2.0))
    modules: list[nn.Module] = []
    for inputs, outputs, stride, gain in sizes:
        modules += [*convolution((inputs, outputs), 3, stride, gain, batch_norm), nn.ReLU()]
    return nn.Sequential(*modules, nn.Flatten(), nn.Linear(2 * width * 4, CLASSES))


def network(name: str, batch_norm: bool = False, width: int = 64) -> nn.Module:
    """One of "vgg11", "vgg19", "resnet18", "resnet34" and "three-convolutions", drawn from torch's own random state.

    >>> sum(p.numel() for p in network("resnet18").parameters())
    11169162
    """
    if name in ("vgg11", "vgg19"):
        return vgg(int(name.removeprefix("vgg")), width, batch_norm)
    if name in ("resnet18", "resnet34"):
        return ResNet(BLOCKS[int(name.removeprefix("resnet"))], width, batch_norm)
    if name == "three-convolutions":
        return three_convolutions(max(width // 4, 1), batch_norm)
    raise NameLookupError(unknown("network", name, ("vgg11", "vgg19", "resnet18", "resnet34", "three-convolutions")))


class InBfloat16(nn.Module):
    """A network whose products and convolutions are in bfloat16; its weights, gradients and logits are in float32.

    >>> InBfloat16(three_convolutions(4))(torch.rand(2, 1, 8, 8)).dtype
    torch.float32
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """The network's logits."""
        with torch.autocast(x.device.type, torch.bfloat16):
            found = self.network(x)
        return found.float()


def standardized(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Images with the mean taken off and divided by the deviation, channel by channel, both over all images of `like`.

    >>> x = torch.rand(5, 1, 8, 8)
    >>> torch.allclose(standardized(2 * x + 1), standardized(x), atol=1e-4)
    True
    """
    like = x if like is None else like
    mean, deviation = like.mean((0, 2, 3), keepdim=True), like.std((0, 2, 3), keepdim=True)
    return (x - mean) / deviation.clamp_min(torch.finfo(x.dtype).eps)
