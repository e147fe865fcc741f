"""Bags of embeddings: each token's row is looked up as in an embedding, and a bag's rows are added up."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.layers.embedding import EmbeddingRule, Table
from layerwise.layers.rule import layer_rule


@layer_rule(nn.EmbeddingBag)
class EmbeddingBagRule(EmbeddingRule):
    """The look-up is the layer (K = 1, I = vocabulary, O = dim, indices as inputs); sums and means come after it."""

    own_forward = True

    def refuses(self, module: Table) -> str | None:
        """Options under which the look-up is not a plain linear map, or the bag no sum."""
        if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
            return "mode='max' takes each feature from another token"
        return super().refuses(module)

    def forward(
        self,
        module: Table,
        record: Callable[[str, Tensor, Tensor], None],
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """The bag as a look-up and a weighted sum: bags are rows of `input`, or begin at `offsets`."""
        assert isinstance(module, nn.EmbeddingBag)
        rows = F.embedding(input, module.weight, module.padding_idx)
        record("", input, rows)
        counts = torch.ones_like(rows[..., :1])
        if module.padding_idx is not None:
            counts = counts * (input != module.padding_idx).unsqueeze(-1)
        weights = counts if per_sample_weights is None else counts * per_sample_weights.unsqueeze(-1)
        rows = rows * weights
        if offsets is None:
            total, count = rows.sum(-2), counts.sum(-2)
        else:
            starts = offsets[:-1] if module.include_last_offset else offsets
            bag = torch.bucketize(torch.arange(len(input), device=input.device), starts, right=True) - 1
            total = rows.new_zeros(len(starts), rows.shape[-1]).index_add(0, bag, rows)
            count = counts.new_zeros(len(starts), 1).index_add(0, bag, counts)
        return total / count.clamp_min(1) if module.mode == "mean" else total
