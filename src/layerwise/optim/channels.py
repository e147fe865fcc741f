"""SUA (spatially uncorrelated activations): an input factor on channels alone, alike at every kernel offset.

    Q = blockdiag(A_ch ⊗ I_taps, 1)

``A_ch [K, c, c]`` is the second moment of the layer's raw input over all its positions, each counted once and padding
left out. The bias column, where there is one, is a block of its own: its second moment is 1, and it is taken to be
uncorrelated with the rest. A kernel with one offset has nothing to assume and keeps its full factor.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def times_inputs(
    X: Float[Tensor, "*B K O I"], Q: Tensor, bias: Float[Tensor, "K 1"] | None = None
) -> Float[Tensor, "*B K O I"]:
    """``X Q``: Q full ``[K, I, I]``, diagonal ``[K, I]``, or on channels ``[K, c, c]`` with the bias's own number."""
    if Q.ndim == 2:
        return X * Q.unsqueeze(-2)
    if bias is not None:
        return torch.cat([times_inputs(X[..., :-1], Q), X[..., -1:] * bias.unsqueeze(-1)], dim=-1)
    c = Q.shape[-1]
    if X.shape[-1] == c:
        return X @ Q
    by_offset = X.unflatten(-1, (c, -1)).mT  # ... K O taps c: one product for all offsets
    return (by_offset.flatten(-3, -2) @ Q).unflatten(-2, by_offset.shape[-3:-1]).mT.flatten(-2)


def whole_spectrum(values: Float[Tensor, "k c"], inputs: int, bias: Float[Tensor, "k 1"] | None) -> Tensor:
    """Eigenvalues of Q ``[k, I]`` in the order of the weight's columns, from those of ``A_ch``."""
    taps = (inputs - (bias is not None)) // values.shape[-1]
    spread = values.repeat_interleave(taps, -1)
    return spread if bias is None else torch.cat([spread, bias.to(spread)], dim=-1)
