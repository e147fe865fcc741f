"""Whether float32 products on a GPU may round their factors to ten bits of mantissa: TF32, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Products and convolutions of float32 in TF32, or in full; afterwards as it was. Other devices take no notice.

    >>> with tf32(True):
    ...     torch.get_float32_matmul_precision()
    'high'
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
