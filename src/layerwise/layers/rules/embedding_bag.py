"""Bags of embeddings: each token's row is looked up as in an embedding, and a bag's rows are added up."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.foundations.errors import InputError, describe
from layerwise.layers.form import layer_rule
from layerwise.layers.rules.embedding import EmbeddingRule, Table


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
        looked_up = rows = F.embedding(input, module.weight, module.padding_idx)
        record("", input, rows)
        wide = rows.dtype if rows.dtype.itemsize >= 4 else torch.float32  # a half type cannot count to 300
        counts = torch.ones_like(rows[..., :1], dtype=wide)
        if module.padding_idx is not None:
            counts = counts * (input != module.padding_idx).unsqueeze(-1)
        weights = counts if per_sample_weights is None else counts * per_sample_weights.unsqueeze(-1)
        rows = rows * weights  # in the wider type
        if offsets is None:
            total, count = rows.sum(-2), counts.sum(-2)
        else:
            starts = offsets[:-1] if module.include_last_offset else offsets
            if input.device.type == "cpu" and len(starts) and int(starts[0]) != 0:  # on a GPU torch asks nothing
                raise InputError(
                    describe(
                        f"an embedding bag of {module.num_embeddings} rows whose offsets begin at {int(starts[0])}",
                        "offsets that begin at 0; of a batch that is cut into examples they do not",
                        "pass bags as the rows of a matrix [N, L], with padding_idx where they are shorter",
                    )
                )
            bag = torch.bucketize(torch.arange(len(input), device=input.device), starts, right=True) - 1
            inside = (bag >= 0).unsqueeze(-1)
            total = rows.new_zeros(len(starts), rows.shape[-1]).index_add(0, bag.clamp_min(0), rows * inside)
            count = counts.new_zeros(len(starts), 1).index_add(0, bag.clamp_min(0), counts * inside)
        return (total / count.clamp_min(1) if module.mode == "mean" else total).to(looked_up.dtype)
