"""Alignment of each layer's tangent kernel with the targets, on some examples and some functions of the output."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layerwise.foundations.errors import LayerwiseError
from layerwise.foundations.likelihoods import Terms
from layerwise.foundations.random import stream
from layerwise.foundations.types import Tree
from layerwise.kernel.alignment import cka
from layerwise.kernel.ntk import ntk

ROWS = 1280
"""Rows of the kernel: examples × functions."""
SHUFFLES = 200
FEWEST = 64
"""Examples below which shuffled labels are no yardstick."""


@dataclass(frozen=True)
class Aligned:
    """By layer, and of the whole kernel against shuffled labels."""

    layers: Mapping[str, float]
    shuffled_z: float | None
    examples: int
    functions: int
    note: str | None = None


def measure_alignment(
    model: nn.Module, x: Tree, terms: Terms, examples: int, functions: int, seed: int, memory: int
) -> Aligned | None:
    """CKA of ``lw.ntk`` with the targets.

    Args:
        model: as it is.
        x: inputs of `examples` examples.
        terms: output and target of the same.
        examples: how many.
        functions: how many functions of the output there may be, each a backward pass. Where the model has more
            outputs, random signed sums of them are taken, of kernel and target alike.
        seed: of those sums and of the shuffles.
        memory: bytes allowed.
    """
    target = _target(terms)
    if target is None:
        return None
    outputs = int(math.prod(terms.f.shape[1:]))
    signs = None
    if outputs > functions:
        drawn = torch.rand(outputs, functions, generator=stream(seed, "functions")) < 0.5
        signs = torch.where(drawn, 1.0, -1.0).to(terms.f.device)
        target = target.to(signs.dtype) @ signs
    try:
        K = ntk(model, x, outputs="all" if signs is None else _Sums(signs), seed=seed, memory=memory, progress=False)
        kernels = K.per_layer()
    except LayerwiseError as error:
        return Aligned({}, None, examples, functions, f"The tangent kernel was not measured: {error}")
    target = target.to(next(iter(kernels.values())).dtype)
    found = {name: float(cka(kernel, target)) for name, kernel in kernels.items()}
    z = None
    if examples >= FEWEST and terms.f.shape[1] == 1:
        whole = sum((kernel.matrix().double() for kernel in kernels.values()), torch.zeros((), dtype=torch.float64))
        z = _against_shuffles(whole, target.double(), seed)
    return Aligned(found, z, examples, target.shape[1])


@dataclass(frozen=True)
class _Sums:
    """Signed sums of all outputs of an example."""

    signs: Tensor

    def __call__(self, f: Tensor) -> Tensor:
        return f.reshape(f.shape[0], -1).to(self.signs.dtype) @ self.signs


def _target(terms: Terms) -> Tensor | None:
    """Labels (one-hot) or values, ``[N, S·C]``, zero where a term does not count."""
    if terms.y is None:
        return None
    n, s, c = terms.f.shape
    if terms.y.ndim == 2:
        y = torch.nn.functional.one_hot(terms.y.long().clamp(0, c - 1), c).to(terms.f.dtype)
    elif terms.y.shape == terms.f.shape:
        y = terms.y.to(terms.f.dtype)
    else:
        return None
    y = torch.where((terms.weight > 0).unsqueeze(-1), y, 0.0)
    return y.reshape(n, s * c)


def _against_shuffles(K: Tensor, target: Tensor, seed: int) -> float:
    """How many standard deviations ``yᵀ K y`` lies above its values for shuffled examples; centred per output."""
    n, p = target.shape
    y = target - target.mean(0)
    blocks = K.reshape(n, p, n, p)
    blocks = blocks - blocks.mean(0, keepdim=True)
    blocks = blocks - blocks.mean(2, keepdim=True)
    order = stream(seed, "shuffles")
    rows = [y.reshape(-1)]
    rows += [y[torch.randperm(n, generator=order).to(y.device)].reshape(-1) for _ in range(SHUFFLES)]
    Y = torch.stack(rows)
    values = ((Y @ blocks.reshape(n * p, n * p)) * Y).sum(1)
    true, shuffled = values[0], values[1:]
    return float((true - shuffled.mean()) / shuffled.std().clamp_min(1e-300))
