"""Embeddings: a linear map of one-hot vectors, which are never formed."""

import torch
from torch import Tensor, nn

from layerwise.layers.form import Form, LayerRule, Part, layer_rule
from layerwise.layers.io.one_hot import OneHot

Table = nn.Embedding | nn.EmbeddingBag
"""Modules that look rows up; their options have the same names."""


@layer_rule(nn.Embedding)
class EmbeddingRule(LayerRule[Table]):
    """K = 1, I = vocabulary, O = dim; the input factor is diagonal."""

    def refuses(self, module: Table) -> str | None:
        """Options under which the layer is not a plain linear map."""
        if module.max_norm is not None:
            return "max_norm rescales the weight during the forward"
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq changes the gradient by the batch's token counts"
        if module.sparse:
            return "sparse gradients have no batched pull-back"
        return None

    def forms(self, module: Table, parts: dict[str, Part]) -> dict[str, Form]:
        """The table, transposed."""
        i, o = module.num_embeddings, module.embedding_dim
        return {"": Form(1, o, i, parts["weight"], None, transposed=True, one_hot=True)}

    def lead(self, module: Table, site: str, x: Tensor) -> int:
        """Every axis of the indices."""
        return x.ndim

    def inputs(self, module: Table, site: str, x: Tensor) -> OneHot:
        """Indices; the padding token contributes nothing to the gradient."""
        index = x.long().unsqueeze(-1)
        if module.padding_idx is not None:
            index = torch.where(index == module.padding_idx, -1, index)
        return OneHot(index, module.num_embeddings)

    def outgrads(self, module: Table, site: str, dy: Tensor) -> Tensor:
        """``[V, *lead, 1, 1, dim]``."""
        return dy.unsqueeze(-2).unsqueeze(-2)
