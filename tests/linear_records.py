"""What linear layers of one shape saw in a batch, made up: for tests of what a rule makes of it."""

import torch
from torch import Tensor, nn

from layerwise.layers.io.layer_io import LayerCall, Layout, RecordedIO
from layerwise.layers.table import LayerTable
from layerwise.optim.rule import Recorded

FACTOR = 3.0


def linear_records(
    layers: int,
    examples: int,
    s: int,
    p: int,
    q: int,
    bias: bool,
    x_dtype: torch.dtype = torch.bfloat16,
    axis: int = 0,
    device: str = "cpu",
) -> list[list[Recorded]]:
    """One call each, of `examples` with S positions; examples are on `axis`, 0 or 1. Without positions where S is 1."""
    generator, found = torch.Generator().manual_seed(0), []
    half = torch.float16 if x_dtype == torch.float16 else torch.bfloat16
    lead = (examples,) if s == 1 else (examples, s) if axis == 0 else (s, examples)
    for _ in range(layers):
        spec = LayerTable.from_model(nn.Linear(q, p, bias=bias)).layers[0]
        # rows have something in common, so that sums over positions do not cancel and a bias counts
        x, dy = (torch.randn(*lead, width, generator=generator) + common for width, common in ((q, 1), (p, 0.5)))
        call = LayerCall(spec.sites[0], x.to(device, x_dtype), dy.to(device, half).unsqueeze(0), Layout(axis))
        found.append([Recorded(RecordedIO(spec, (call,), examples), FACTOR, (0, 0))])
    return found


def bases(layers: int, own: int, width: int) -> Tensor:
    """Orthogonal matrices, with the identity in what they have beyond their own rows."""
    generator = torch.Generator().manual_seed(own)
    U = torch.linalg.qr(torch.randn(layers, own, own, generator=generator, dtype=torch.float64)).Q
    return torch.stack([torch.block_diag(u, torch.eye(width - own, dtype=u.dtype)) for u in U]).float()


def exact_squares(records: list[list[Recorded]], U_P: Tensor, U_Q: Tensor) -> Tensor:
    """``Σ_n (U_Pᵀ (Σ_s g aᵀ) U_Q)²`` in float64, of rows as bfloat16 has them."""
    found = []
    for (record,), P, Q in zip(records, U_P.double().cpu(), U_Q.double().cpu(), strict=True):
        call, n = record.io.calls[0], record.io.examples
        g = call.outgrads(n, torch.bfloat16)[0].squeeze(2).double().cpu()
        a = call.inputs(n, torch.bfloat16)
        assert isinstance(a, Tensor)
        a = a.squeeze(2).double().cpu()
        a = torch.cat([a, torch.ones_like(a[..., :1])], dim=-1) if record.io.spec.form.bias is not None else a
        turned = P[: g.shape[-1]].mT @ (record.factor * g.mT @ a) @ Q[: a.shape[-1]]
        found.append(turned.square().sum(0))
    return torch.stack(found)
