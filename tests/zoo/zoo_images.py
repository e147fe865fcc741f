"""Networks for images as torchvision has them, small: a residual net with batch norm, VGG, MobileNet and ConvNeXt."""

import torch
from torch import Tensor, nn


def _normed(i: int, o: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution without bias, and batch norm."""
    conv = nn.Conv2d(i, o, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(o)]


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut (He et al., 2016)."""

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_normed(i, o, 3, stride), nn.ReLU(inplace=True), *_normed(o, o, 3))
        self.shortcut = nn.Sequential(*_normed(i, o, 1, stride)) if stride > 1 or i != o else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.shortcut(x))


def resnet(classes: int = 5) -> nn.Module:
    """ResNet with basic blocks."""
    return nn.Sequential(
        *_normed(3, 4, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        BasicBlock(4, 4, 1),
        BasicBlock(4, 6, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, classes),
    )


def vgg(classes: int = 5) -> nn.Module:
    """VGG: plain convolutions, then a wide classifier with dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 6, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 10),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(10, classes),
    )


class InvertedResidual(nn.Module):
    """Expand, filter each channel alone, project (Sandler et al., 2018)."""

    def __init__(self, i: int, o: int, stride: int, expand: int = 2) -> None:
        super().__init__()
        h = expand * i
        self.body = nn.Sequential(
            *_normed(i, h, 1), nn.ReLU6(), *_normed(h, h, 3, stride, groups=h), nn.ReLU6(), *_normed(h, o, 1)
        )
        self.residual = stride == 1 and i == o

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class SqueezeExcitation(nn.Module):
    """Channels weighted by what they hold on the whole, through convolutions of one pixel (MobileNetV3)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = nn.functional.adaptive_avg_pool2d(x, 1)
        return x * nn.functional.hardsigmoid(self.fc2(self.fc1(scale).relu()))


def mobilenet(classes: int = 5) -> nn.Module:
    """MobileNet: depthwise convolutions between pointwise ones."""
    return nn.Sequential(
        *_normed(3, 4, 3, 2),
        nn.Hardswish(),
        InvertedResidual(4, 4, 1),
        SqueezeExcitation(4),
        InvertedResidual(4, 6, 2),
        *_normed(6, 8, 1),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, classes),
    )


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of each pixel, as torchvision's: a subclass whose forward permutes."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, norm and a two-layer perceptron over channels, scaled (Liu et al., 2022)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.expand, self.project = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.layer_scale = nn.Parameter(torch.full((channels, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.project(nn.functional.gelu(self.expand(h))).permute(0, 3, 1, 2)
        return x + self.layer_scale * h


def convnext(classes: int = 5) -> nn.Module:
    """ConvNeXt: patches, blocks, a halving of the sides, blocks."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 2, 2),
        LayerNorm2d(4, eps=1e-6),
        ConvNeXtBlock(4),
        LayerNorm2d(4, eps=1e-6),
        nn.Conv2d(4, 6, 2, 2),
        ConvNeXtBlock(6),
        nn.AdaptiveAvgPool2d(1),
        LayerNorm2d(6, eps=1e-6),
        nn.Flatten(),
        nn.Linear(6, classes),
    )
