"""Ways to ``J v``: which one is taken, and that it is right."""

import pytest
import torch
from torch import nn

from layerwise.layers.capture.linearize import Linearization


@pytest.mark.parametrize(("padding", "way"), [(None, "forward"), (2, "double")])
def test_only_an_embedding_with_padding_is_kept_from_forward_mode(padding: int | None, way: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3, padding_idx=padding), nn.Linear(3, 2)).double()
    linear = Linearization(model, [name for name, _ in model.named_parameters()])
    x = torch.tensor([[0, 1], [4, 3]])
    f = linear.run(x)
    v = {name: torch.randn(1, *p.shape, dtype=p.dtype) for name, p in model.named_parameters()}
    pushed = linear.push(x, f, v, lambda out: out)
    assert set(linear._checked.values()) == {way}
    torch.testing.assert_close(pushed, linear._double(x, f, v, lambda out: out))
