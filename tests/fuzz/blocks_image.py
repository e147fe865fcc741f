"""Blocks over images ``[N, D, H, W]``; each keeps the shape, and none lets one example influence another."""

import torch.nn.functional as F
from parts import Apply, Context, Sizes, bare, block
from torch import Tensor, nn
from torch.nn.utils import parametrizations


def _conv(s: Sizes, **options: int | bool) -> nn.Conv2d:
    return nn.Conv2d(s.D, s.D, 3, **{"padding": 1, **options})


@block("image")
def conv2d(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.conv(h).tanh(), conv=_conv(s, bias=s.number % 2 == 0))


@block("image")
def conv2d_depthwise(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.conv(h).tanh(), conv=_conv(s, groups=s.D))


@block("image")
def conv2d_dilated(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.conv(h).tanh(), conv=_conv(s, padding=2, dilation=2))


@block("image")
def conv2d_strided(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: h + F.interpolate(m.conv(h), size=h.shape[2:]), conv=_conv(s, stride=2))


@block("image")
def conv2d_transposed(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.conv(h).tanh(), conv=nn.ConvTranspose2d(s.D, s.D, 3, padding=1))


@block("image")
def conv2d_twice(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.conv(m.conv(h).tanh()), conv=_conv(s))


@block("image")
def conv2d_reused(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.conv(h).tanh() + F.conv2d(h.cos(), m.conv.weight, padding=1), conv=_conv(s))


@block("image")
def conv2d_centred_weight(s: Sizes) -> nn.Module:
    """A layer that is never called: its weight is centred, and used by a function."""

    def forward(m: Apply, h: Tensor, c: Context) -> Tensor:
        w = m.conv.weight
        return F.conv2d(h, w - w.mean((1, 2, 3), keepdim=True), m.conv.bias, padding=1).tanh()

    return Apply(forward, conv=_conv(s))


@block("image")
def conv2d_weight_norm(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.conv(h).tanh(), conv=parametrizations.weight_norm(nn.Conv2d(s.D, s.D, 1)))


@block("image")
def image_group_norm(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.norm(h), norm=nn.GroupNorm(1, s.D))


@block("image", train=False)
def image_batch_norm(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.norm(h), norm=nn.BatchNorm2d(s.D))


@block("image")
def image_instance_norm(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.norm(h), norm=nn.InstanceNorm2d(s.D, affine=True))


@block("image")
def image_prelu(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.p(h), p=nn.PReLU(s.D))


@block("image")
def image_scale(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: h * m.scale + m.shift, scale=bare(s.D, 1, 1), shift=bare(1, s.D, 1, 1))


@block("image")
def image_rezero(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: h + m.zero * m.conv(h).tanh(), conv=_conv(s), zero=bare())


@block("image")
def image_in_place(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.conv(h).add_(h).relu_(), conv=_conv(s))


@block("image")
def channels_last_linear(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.l(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).tanh(), l=nn.Linear(s.D, s.D))


@block("image")
def image_sorted(s: Sizes) -> nn.Module:
    def forward(m: Apply, h: Tensor, c: Context) -> Tensor:
        order = c.key.argsort()
        return m.conv(h[order]).tanh()[order.argsort()]

    return Apply(forward, conv=_conv(s))


@block("image")
def image_reversed(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.conv(h.flip(0)).tanh().flip(0), conv=_conv(s))


@block("image", wants="two signs")
def image_branch(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.a(h) if c.positive else m.b(h).tanh(), a=_conv(s), b=_conv(s))


@block("image", wants="flag")
def image_flag(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.conv(m.conv(h)) if c.flag else m.conv(h), conv=_conv(s, bias=False))
