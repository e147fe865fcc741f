"""Blocks over sequences ``[N, T, D]``; each keeps the shape, and none lets one example influence another."""

import torch
import torch.nn.functional as F
from parts import Apply, Context, Sizes, bare, block
from torch import Tensor, nn


def _square(s: Sizes) -> nn.Linear:
    return nn.Linear(s.D, s.D)


# --- convolutions along time -------------------------------------------------------------------------------


@block("sequence")
def conv1d(s: Sizes) -> nn.Module:
    conv = nn.Conv1d(s.D, s.D, 3, padding=2, dilation=2, groups=s.D if s.number % 2 else 1)
    return Apply(lambda m, h, c: m.conv(h.mT).mT.tanh(), conv=conv)


@block("sequence")
def conv1d_strided(s: Sizes) -> nn.Module:
    def forward(m: Apply, h: Tensor, c: Context) -> Tensor:
        return h + F.interpolate(m.conv(h.mT), size=h.shape[1]).mT

    return Apply(forward, conv=nn.Conv1d(s.D, s.D, 2, stride=2, padding=1, bias=False))


@block("sequence")
def conv1d_transposed(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.conv(h.mT).mT.tanh(), conv=nn.ConvTranspose1d(s.D, s.D, 3, padding=1))


# --- attention ---------------------------------------------------------------------------------------------


def _attention(s: Sizes, **options: bool) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(s.D, 2 if s.D % 2 == 0 else 1, batch_first=True, **options)


def _attend(m: Apply, h: Tensor, c: Context) -> Tensor:
    return h + m.mix(h, h, h)[0]


@block("sequence")
def attention(s: Sizes) -> nn.Module:
    return Apply(_attend, mix=_attention(s, bias=s.number % 2 == 0))


@block("sequence")
def attention_time_first(s: Sizes) -> nn.Module:
    def forward(m: Apply, h: Tensor, c: Context) -> Tensor:
        z = h.transpose(0, 1)
        return h + m.mix(z, z, z, need_weights=False)[0].transpose(0, 1)

    return Apply(forward, mix=nn.MultiheadAttention(s.D, 1))


@block("sequence")
def attention_causal(s: Sizes) -> nn.Module:
    def forward(m: Apply, h: Tensor, c: Context) -> Tensor:
        T = h.shape[1]
        blocked = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
        return h + m.mix(h, h, h, attn_mask=blocked, need_weights=False)[0]

    return Apply(forward, mix=_attention(s))


@block("sequence")
def attention_to_other(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: h + m.mix(h, m.l(h), m.l(h).cos())[0], mix=_attention(s), l=_square(s))


@block("sequence")
def attention_frozen_projections(s: Sizes) -> nn.Module:
    model = Apply(_attend, mix=_attention(s))
    model.mix.in_proj_weight.requires_grad_(False)
    return model


@block("sequence")
def attention_biases_only(s: Sizes) -> nn.Module:
    model = Apply(_attend, mix=_attention(s))
    for name, p in model.named_parameters():
        p.requires_grad_("bias" in name)
    return model


@block("sequence")
def attention_weight_elsewhere(s: Sizes) -> nn.Module:
    D = s.D
    return Apply(lambda m, h, c: _attend(m, h, c) + F.linear(h, m.mix.in_proj_weight[:D]), mix=_attention(s))


@block("sequence")
def attention_twins(s: Sizes) -> nn.Module:
    a, b = _attention(s), _attention(s)
    b.in_proj_weight = a.in_proj_weight
    return Apply(lambda m, h, c: h + m.a(h, h, h)[0] + m.b(h.cos(), h, h)[0], a=a, b=b)


@block("sequence")
def transformer_layer(s: Sizes) -> nn.Module:
    layer = nn.TransformerEncoderLayer(s.D, 1, s.D, dropout=0.0, batch_first=True, norm_first=s.number % 2 == 0)
    return Apply(lambda m, h, c: m.layer(h), layer=layer)


@block("sequence")
def attention_by_hand(s: Sizes) -> nn.Module:
    D = s.D

    def forward(m: Apply, h: Tensor, c: Context) -> Tensor:
        q, k, v = (F.linear(h, m.w[i * D : (i + 1) * D], m.b[i * D : (i + 1) * D]) for i in range(3))
        return h + m.out((q @ k.mT).softmax(-1) @ v)

    return Apply(forward, w=bare(3 * D, D), b=bare(3 * D), out=_square(s))


# --- recurrent ---------------------------------------------------------------------------------------------


@block("sequence")
def lstm(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.rnn(h)[0], rnn=nn.LSTM(s.D, s.D, batch_first=True))


@block("sequence")
def gru_time_first(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.rnn(h.transpose(0, 1))[0].transpose(0, 1), rnn=nn.GRU(s.D, s.D))


# --- positions ---------------------------------------------------------------------------------------------


@block("sequence")
def position_embedding(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: h + m.pos(torch.arange(h.shape[1])), pos=nn.Embedding(s.T, s.D))


@block("sequence")
def position_parameter(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: (h + m.pos[: h.shape[1]]).tanh(), pos=bare(s.T, s.D))


@block("sequence")
def position_parameter_with_axis(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: (h + m.pos[:, : h.shape[1]]).tanh(), pos=bare(1, s.T, s.D))


@block("sequence")
def class_token(s: Sizes) -> nn.Module:
    def forward(m: Apply, h: Tensor, c: Context) -> Tensor:
        z = m.l(torch.cat([m.token.expand(len(h), -1, -1), h], 1)).cumsum(1).tanh()
        return z[:, 1:] + z[:, :1]

    return Apply(forward, token=bare(1, 1, s.D), l=_square(s))


@block("sequence", fixed=True)
def scale_of_positions(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: h * m.scale, scale=bare(s.T, 1))


@block("sequence", fixed=True)
def layer_norm_two_axes(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.norm(h), norm=nn.LayerNorm([s.T, s.D]))


@block("sequence", fixed=True)
def token_mixing(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: h + m.mix(h.mT).mT, mix=nn.Linear(s.T, s.T, bias=s.number % 2 == 0))


# --- layouts -----------------------------------------------------------------------------------------------


@block("sequence")
def time_first(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.l(h.transpose(0, 1)).transpose(0, 1).tanh(), l=_square(s))


@block("sequence")
def merged(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.l(h.flatten(0, 1)).unflatten(0, h.shape[:2]).tanh(), l=_square(s))


@block("sequence")
def merged_time_first(s: Sizes) -> nn.Module:
    def forward(m: Apply, h: Tensor, c: Context) -> Tensor:
        z = h.transpose(0, 1)
        return m.l(z.flatten(0, 1)).unflatten(0, z.shape[:2]).transpose(0, 1).tanh()

    return Apply(forward, l=_square(s))


@block("sequence")
def permuted(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.l(h.permute(1, 0, 2)).permute(1, 0, 2) * m.scale, l=_square(s), scale=bare(s.D))


@block("sequence", wants="kept")
def packed(s: Sizes) -> nn.Module:
    """Positions that count, one after another, as sequences without padding are run."""

    def forward(m: Apply, h: Tensor, c: Context) -> Tensor:
        assert c.kept is not None
        out = torch.zeros_like(h)
        out[c.kept] = m.l(h[c.kept]).tanh().to(out.dtype)
        return out + h

    return Apply(forward, l=_square(s))


@block("sequence", wants="kept")
def masked(s: Sizes) -> nn.Module:
    def forward(m: Apply, h: Tensor, c: Context) -> Tensor:
        assert c.kept is not None
        return m.l(h * c.kept.unsqueeze(-1)).cumsum(1).tanh()

    return Apply(forward, l=_square(s))


@block("sequence")
def sorted_positions(s: Sizes) -> nn.Module:
    """All rows of all examples in an order of the data."""

    def forward(m: Apply, h: Tensor, c: Context) -> Tensor:
        rows = h.flatten(0, 1)
        order = rows.detach().sum(-1).argsort()
        return m.l(rows[order]).tanh()[order.argsort()].view(h.shape)

    return Apply(forward, l=_square(s))
