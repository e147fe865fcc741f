"""Multi-head attention: its projections are linear layers, which the fused forward hides.

While recording, the module runs the equivalent forward below, made of recorded linear calls. The output
projection is a child `nn.Linear` and is recorded as such.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.layers.form import Form, LayerRule, Part, layer_rule

_SITES = ("q", "k", "v")


@layer_rule(nn.MultiheadAttention)
class AttentionRule(LayerRule[nn.MultiheadAttention]):
    """Sites "q", "k" and "v", each a linear layer over its own rows of the packed parameters."""

    own_forward = True
    rounds_inputs = True

    def forms(self, module: nn.MultiheadAttention, parts: dict[str, Part]) -> dict[str, Form]:
        """Three linear forms."""
        e = module.embed_dim
        widths = (e, e, e) if module._qkv_same_embed_dim else (e, module.kdim, module.vdim)
        forms = {}
        for index, (site, width) in enumerate(zip(_SITES, widths, strict=True)):
            rows = (index * e, (index + 1) * e)
            packed, own, bias = (parts.get(n) for n in ("in_proj_weight", f"{site}_proj_weight", "in_proj_bias"))
            weight = Part(packed.name, packed.shape, rows) if packed else own
            shift = Part(bias.name, bias.shape, rows) if bias else None
            if weight or shift:
                forms[site] = Form(1, e, width if weight else 0, weight, shift)
        return forms

    def lead(self, module: nn.MultiheadAttention, site: str, x: Tensor) -> int:
        """All but the features."""
        return x.ndim - 1

    def inputs(self, module: nn.MultiheadAttention, site: str, x: Tensor) -> Tensor:
        """As a linear layer."""
        return x.unsqueeze(-2).unsqueeze(-2)

    def outgrads(self, module: nn.MultiheadAttention, site: str, dy: Tensor) -> Tensor:
        """As a linear layer."""
        return dy.unsqueeze(-2).unsqueeze(-2)

    def forward(
        self,
        module: nn.MultiheadAttention,
        record: Callable[[str, Tensor, Tensor], None],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        **unknown: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The same numbers as the module's own forward, dropout included."""
        if unknown:
            raise TypeError(f"MultiheadAttention.forward got unexpected arguments {sorted(unknown)}")
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        # As in torch: the hint replaces the mask, and appended keys (add_bias_kv, add_zero_attn) fall under it too.
        causal = is_causal and key_padding_mask is None and not need_weights
        attn_mask = None if causal else attn_mask
        batched = query.dim() == 3
        projected = []
        for site, x in zip(_SITES, (query, key, value), strict=True):
            y = F.linear(x, *_projection(module, site))
            record(site, x, y)
            y = y if batched else y.unsqueeze(1 - int(module.batch_first))
            projected.append(y if module.batch_first else y.transpose(0, 1))
        q, k, v = projected
        q, k, v, mask = _extended(module, q, k, v, _merged_mask(module, projected, key_padding_mask, attn_mask))
        heads, weights = _attend(module, q, k, v, mask, need_weights, causal)
        joined = heads.transpose(1, 2).flatten(2)  # N T E
        joined = joined if module.batch_first else joined.transpose(0, 1)
        out = module.out_proj(joined if batched else joined.squeeze(1 - int(module.batch_first)))
        if weights is None:
            return out, None
        weights = weights.mean(1) if average_attn_weights else weights
        return out, weights if batched else weights.squeeze(0)


def _projection(module: nn.MultiheadAttention, site: str) -> tuple[Tensor, Tensor | None]:
    index, e = _SITES.index(site), module.embed_dim
    rows = slice(index * e, (index + 1) * e)
    packed = module.in_proj_weight
    weight = getattr(module, f"{site}_proj_weight") if packed is None else packed[rows]
    return weight, None if module.in_proj_bias is None else module.in_proj_bias[rows]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask (True: not allowed) as numbers to add."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _merged_mask(
    module: nn.MultiheadAttention,
    qkv: list[Tensor],
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> Tensor | None:
    """Both masks as one, [N or 1, heads or 1, T, keys]."""
    n, t, _ = qkv[0].shape
    keys = qkv[1].shape[1]
    mask = None
    if attn_mask is not None:
        mask = _additive(attn_mask, qkv[0].dtype)
        mask = mask.view(1, 1, t, keys) if mask.dim() == 2 else mask.view(n, module.num_heads, t, keys)
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, qkv[0].dtype).view(n, 1, 1, keys)
        mask = padding if mask is None else mask + padding
    return mask


def _extended(
    module: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Heads split, with the learned and the zero key appended where the module asks for them."""
    n = q.shape[0]
    extra = 0
    if module.bias_k is not None and module.bias_v is not None:
        k = torch.cat([k, module.bias_k.expand(n, -1, -1)], dim=1)
        v = torch.cat([v, module.bias_v.expand(n, -1, -1)], dim=1)
        extra += 1
    q, k, v = (t.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for t in (q, k, v))  # N heads T dim
    if module.add_zero_attn:
        k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        extra += 1
    if mask is not None and extra:
        mask = F.pad(mask, (0, extra))
    return q, k, v, mask


def _attend(
    module: nn.MultiheadAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    need_weights: bool,
    causal: bool,
) -> tuple[Tensor, Tensor | None]:
    dropout = module.dropout if module.training else 0.0
    if not need_weights:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal), None
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    weights = (scores if mask is None else scores + mask).softmax(-1)
    weights = F.dropout(weights, dropout) if dropout > 0 else weights
    return weights @ v, weights
