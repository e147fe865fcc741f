"""Embeddings: a linear map of one-hot vectors."""

import pytest
import torch
from torch import nn

from layerwise.layers.io.one_hot import OneHot
from layerwise.layers.rules.embedding import EmbeddingRule
from layerwise.layers.table import LayerTable
from layerwise.testing import check_layer_rule

TOKENS = torch.tensor([[1, 2, 0, 0], [3, 3, 4, 0], [5, 1, 2, 6]])


@pytest.mark.parametrize("padding", [None, 0, -1])
def test_contract(padding: int | None):
    check_layer_rule(nn.Embedding(7, 3, padding_idx=padding), TOKENS, tol=1e-10)


@pytest.mark.parametrize("tokens", [TOKENS[:, 0], TOKENS.view(3, 2, 2), TOKENS.int()])
def test_contract_for_indices_of_any_shape_and_kind(tokens):
    check_layer_rule(nn.Embedding(7, 3), tokens, tol=1e-10)


def test_inputs_stay_indices_and_padding_counts_for_nothing():
    a = EmbeddingRule().inputs(nn.Embedding(7, 3, padding_idx=0), "", TOKENS)
    assert isinstance(a, OneHot)
    assert a.shape == (3, 4, 1, 1, 7)
    assert a.index[0, :, 0].tolist() == [1, 2, -1, -1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"max_norm": 1.0}, "max_norm"), ({"scale_grad_by_freq": True}, "token counts"), ({"sparse": True}, "sparse")],
)
def test_options_that_are_no_linear_map_fall_back_with_the_reason(options, reason: str):
    table = LayerTable.from_model(nn.Sequential(nn.Embedding(7, 3, **options)))
    assert not table.layers[0].sites
    assert reason in str(table.layers[0].reason)
    with pytest.raises(AssertionError, match=reason):
        check_layer_rule(nn.Embedding(7, 3, **options), TOKENS)
