"""The norm of AdamW's update from that of some of its rows, which is all that is measured of large matrices."""

import torch
from jaxtyping import Float
from torch import Tensor

USUAL_UPDATE = 0.2
"""The root mean square of AdamW's updates, about, once gradients are mostly noise."""


def of_all_rows(norms: Float[Tensor, "K"], grad: Float[Tensor, "K O I"], apart: int, count: int) -> Float[Tensor, "K"]:
    """The norm of AdamW's update, from that of every `apart`-th row: times ``√(rows/rows seen)``.

    Rows whose gradient is zero do not count, as of classes that are masked. Where that holds for all that are seen, the
    norm is that of an update with root mean square `USUAL_UPDATE` in the others; where for all rows, all count.

    >>> grad = torch.tensor([1.0, 0, 2, 3, 0, 1]).view(1, 6, 1)
    >>> of_all_rows(torch.tensor([1.0]), grad, apart=3, count=2).square().round()  # 4 rows count, 2 of them seen
    tensor([2.])
    """
    counts = torch.linalg.vector_norm(grad, torch.inf, dim=-1) > 0
    rows, seen = counts.sum(1), counts[:, ::apart][:, :count].sum(1)
    share = torch.where(rows > 0, rows / seen.clamp_min(1), grad.shape[1] / count)
    unseen = USUAL_UPDATE * (rows * grad.shape[2]).to(norms).sqrt()
    return torch.where((seen == 0) & (rows > 0), unseen, norms * share.to(norms).sqrt())
