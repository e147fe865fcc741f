"""Blocks over the last axis, of vectors ``[N, D]`` and of sequences ``[N, T, D]`` alike; each keeps the shape.

None of them lets one example influence another, also where it sorts, packs or routes them.
"""

import torch
import torch.nn.functional as F
from parts import Apply, Context, Sizes, along, bare, block
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


def _square(s: Sizes, bias: bool = True) -> nn.Linear:
    return nn.Linear(s.D, s.D, bias=bias)


# --- layers ------------------------------------------------------------------------------------------------


@block("any")
def linear(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.l(h).tanh(), l=_square(s))


@block("any")
def linear_no_bias(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.l(h).tanh(), l=_square(s, bias=False))


@block("any")
def mlp(s: Sizes) -> nn.Module:
    net = nn.Sequential(nn.Linear(s.D, s.D + 1), nn.GELU(), nn.Linear(s.D + 1, s.D))
    return Apply(lambda m, h, c: h + m.net(h), net=net)


@block("any")
def layer_norm(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.norm(h), norm=nn.LayerNorm(s.D, bias=s.number % 2 == 0))


@block("any")
def rms_norm(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.norm(h), norm=nn.RMSNorm(s.D))


@block("any")
def group_norm(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.norm(h) if h.ndim == 2 else m.norm(h.mT).mT, norm=nn.GroupNorm(1, s.D))


@block("any", train=False)
def batch_norm(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.norm(h) if h.ndim == 2 else m.norm(h.mT).mT, norm=nn.BatchNorm1d(s.D))


@block("any")
def prelu(s: Sizes) -> nn.Module:
    one = s.number % 2 == 0
    return Apply(lambda m, h, c: m.p(h) if one or h.ndim == 2 else m.p(h.mT).mT, p=nn.PReLU(1 if one else s.D))


@block("any", wants="two signs")
def prelu_of_positive_values_at_first(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.p(h if c.positive else h.abs() + 0.1), p=nn.PReLU())


@block("any")
def weight_norm(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.l(h).tanh(), l=parametrizations.weight_norm(_square(s)))


@block("any")
def buffer(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.l(h @ m.mix).tanh(), l=_square(s), mix=torch.randn(s.D, s.D))


@block("any")
def transposed_linear(s: Sizes) -> nn.Module:
    """As some libraries write a linear layer: x @ W + b with W [in, out], on rows."""

    def forward(m: Apply, h: Tensor, c: Context) -> Tensor:
        return torch.addmm(m.b, h.reshape(-1, h.shape[-1]), m.w).view(h.shape).tanh()

    return Apply(forward, w=bare(s.D, s.D), b=bare(s.D))


@block("any")
def lora(s: Sizes) -> nn.Module:
    base = _square(s).requires_grad_(False)
    down, up = nn.Linear(s.D, 1, bias=False), nn.Linear(1, s.D, bias=False)
    return Apply(lambda m, h, c: m.base(h) + m.up(m.down(h)), base=base, down=down, up=up)


@block("any")
def low_rank(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: (h @ m.u @ m.v).tanh(), u=bare(s.D, 1), v=bare(1, s.D))


# --- bare parameters ---------------------------------------------------------------------------------------


@block("any")
def scale_and_shift(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: h * m.scale + m.shift, scale=bare(s.D), shift=bare(s.D))


@block("any")
def temperature(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: h * m.t, t=bare())


@block("any")
def gate(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.l(h) * m.g.sigmoid(), l=_square(s), g=bare(s.D))


@block("any")
def einsum(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: torch.einsum("...i,oi->...o", h, m.w).tanh(), w=bare(s.D, s.D))


@block("any")
def view_of_flat(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: F.linear(h, m.w.view(s.D, s.D)).tanh(), w=bare(s.D * s.D))


@block("any")
def slices(s: Sizes) -> nn.Module:
    D = s.D
    return Apply(lambda m, h, c: F.linear(h, m.w[:D]) * F.linear(h, m.w[D:]).sigmoid(), w=bare(2 * s.D, s.D))


@block("any")
def expanded(s: Sizes) -> nn.Module:
    def forward(m: Apply, h: Tensor, c: Context) -> Tensor:
        rows = h.reshape(len(h), -1, h.shape[-1])
        return torch.bmm(rows, m.w.expand(len(h), -1, -1)).view(h.shape).tanh()

    return Apply(forward, w=bare(1, s.D, s.D))


# --- nothing at first --------------------------------------------------------------------------------------


@block("any")
def rezero(s: Sizes) -> nn.Module:
    """A residual branch behind a gate that starts at 0 (see `made`): at first it has no gradient."""
    return Apply(lambda m, h, c: h + m.zero * m.l(h).tanh(), l=_square(s), zero=bare())


@block("any")
def rezero_reused(s: Sizes) -> nn.Module:
    """The same with a weight that is used twice behind the gate."""
    return Apply(lambda m, h, c: h + m.l(h) + m.zero * F.linear(h.cos(), m.l.weight), l=_square(s), zero=bare())


@block("any")
def dead_relu(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: h + (m.l(h) - 20).relu() + m.k(h).relu(), l=_square(s), k=_square(s))


# --- weights used more than once ---------------------------------------------------------------------------


@block("any")
def twice(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.l(m.l(h).tanh()).tanh(), l=_square(s))


@block("any")
def reused_by_function(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.l(h) + F.linear(h.cos(), m.l.weight), l=_square(s))


@block("any")
def reused_by_product(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.l(h).tanh() @ m.l.weight.T, l=_square(s))


@block("any")
def weight_as_number(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.a(h).tanh() + m.b(h) * m.a.weight.mean(), a=_square(s), b=_square(s))


@block("any")
def weight_borrowed(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.b(h).tanh() + F.linear(h, m.a.weight) + m.a.bias, a=_square(s), b=_square(s))


@block("any")
def reused_for_few(s: Sizes) -> nn.Module:
    """Only some examples use the weight again, and in batches without them the operation does not exist."""

    def forward(m: Apply, h: Tensor, c: Context) -> Tensor:
        out = m.l(h)
        if bool(c.rare.any()):
            out = out + along(c.rare, h) * F.linear(h.cos(), m.l.weight)
        return out.tanh()

    return Apply(forward, l=_square(s))


# --- branches ----------------------------------------------------------------------------------------------


@block("any", wants="two signs")
def branch_of_layers(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.a(h) if c.positive else m.b(h.tanh()), a=_square(s), b=_square(s))


@block("any", wants="two signs")
def branch_reuses(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.l(h) + F.linear(h.cos(), m.l.weight) if c.positive else m.l(h), l=_square(s))


@block("any", wants="flag")
def flag_reuses(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.l(h) + F.linear(h.cos(), m.l.weight) if c.flag else m.l(h), l=_square(s))


@block("any", wants="config")
def config_reuses(s: Sizes) -> nn.Module:
    def forward(m: Apply, h: Tensor, c: Context) -> Tensor:
        return m.l(h) @ m.l.weight if c.config.double else m.l(h)

    return Apply(forward, l=_square(s))


@block("any", wants="config")
def config_chooses(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.a(h) * m.g if c.config.double else m.b(h), a=_square(s), b=_square(s), g=bare(s.D))


# --- what must not count -----------------------------------------------------------------------------------


@block("any")
def target_without_gradient(s: Sizes) -> nn.Module:
    def forward(m: Apply, h: Tensor, c: Context) -> Tensor:
        with torch.no_grad():
            target = m.l(h.cos())
        return m.l(h).tanh() - target

    return Apply(forward, l=_square(s))


@block("any")
def target_detached(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.l(h).tanh() - m.l(h.cos()).detach(), l=_square(s))


@block("any")
def auxiliary(s: Sizes) -> nn.Module:
    def forward(m: Apply, h: Tensor, c: Context) -> Tensor:
        c.hidden.append(m.aux(m.l(h)))
        return m.l(h).tanh()

    return Apply(forward, l=_square(s), aux=_square(s))


# --- ways of running ---------------------------------------------------------------------------------------


@block("any")
def in_place(s: Sizes) -> nn.Module:
    def forward(m: Apply, h: Tensor, c: Context) -> Tensor:
        z = m.l(h)
        z += h
        return m.k(z.tanh_()).relu_() + z

    return Apply(forward, l=_square(s), k=_square(s))


@block("any")
def checkpointed(s: Sizes) -> nn.Module:
    body = nn.Sequential(_square(s), nn.Tanh(), nn.LayerNorm(s.D))
    return Apply(lambda m, h, c: checkpoint(m.body, h, use_reentrant=False), body=body)


# --- orders of examples ------------------------------------------------------------------------------------


@block("any")
def sorted_examples(s: Sizes) -> nn.Module:
    def forward(m: Apply, h: Tensor, c: Context) -> Tensor:
        order = c.key.argsort()
        return m.l(h[order]).tanh()[order.argsort()]

    return Apply(forward, l=_square(s))


@block("any")
def reversed_examples(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: m.l(h.flip(0)).tanh().flip(0), l=_square(s))


@block("any")
def in_chunks(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: torch.cat([m.l(part) for part in h.split(2)]).tanh(), l=_square(s))


@block("any")
def one_example_a_call(s: Sizes) -> nn.Module:
    return Apply(lambda m, h, c: torch.stack([m.l(row).tanh() for row in h]), l=_square(s))


@block("any")
def routed(s: Sizes) -> nn.Module:
    """Every row goes to the expert of its largest score; rows of an expert are gathered, and put back."""

    def forward(m: Apply, h: Tensor, c: Context) -> Tensor:
        rows = h.reshape(-1, h.shape[-1])
        chosen = (rows.detach() @ m.scores).argmax(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate((m.a, m.b)):
            where = (chosen == number).nonzero().squeeze(-1)
            out = out.index_copy(0, where, expert(rows.index_select(0, where)).to(out.dtype))
        return h + out.view(h.shape)

    return Apply(forward, a=_square(s), b=_square(s), scores=torch.randn(s.D, 2))
