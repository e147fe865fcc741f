"""Fully connected ReLU networks, many at once: weights of all runs in one tensor, gradients by hand.

Every run is ``f₀ + α (f − f₀)`` with its own α, rate and start, and is trained as `lw.linearized` with plain SGD
would train it; products of all runs are one batched product. Letters: R runs, S seeds, N examples, P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from layerwise.foundations.random import stream


def drawn(sizes: Sequence[int], seeds: Sequence[int], dtype: torch.dtype = torch.float32) -> Float[Tensor, "S P"]:
    """Weights of one network a seed, drawn as `nn.Linear` draws them: evenly within ± fan-in^-½, biases too."""
    found = []
    for seed in seeds:
        generator = stream(seed, "weights")
        parts = []
        for fan_in, fan_out in pairwise(sizes):
            uniform = torch.rand((fan_in + 1) * fan_out, generator=generator, dtype=torch.float64)
            parts.append((2 * uniform - 1) * fan_in**-0.5)
        found.append(torch.cat(parts))
    return torch.stack(found).to(dtype)


class Stack:
    """Networks of one shape."""

    def __init__(self, sizes: Sequence[int], flat: Float[Tensor, "R P"]) -> None:
        """From the weights of each run, layer by layer: the weights, inputs first, then the biases; they are copied."""
        self.sizes = tuple(sizes)
        """Inputs, hidden units, outputs."""
        self.parts: list[Tensor] = []
        """Weights ``[R, in, out]`` and biases ``[R, 1, out]``, by turns; in one piece each, for fast products."""
        place = 0
        for fan_in, fan_out in pairwise(self.sizes):
            for rows in (fan_in, 1):
                piece = flat[:, place : place + rows * fan_out]
                self.parts.append(piece.reshape(len(flat), rows, fan_out).clone())
                place += rows * fan_out

    @property
    def flat(self) -> Float[Tensor, "R P"]:
        """All weights of each run."""
        return torch.cat([part.flatten(1) for part in self.parts], 1)

    def forward(self, x: Float[Tensor, "R N inputs"]) -> list[Tensor]:
        """The input of every layer, and the outputs."""
        found, last = [x], len(self.parts) - 2
        for k in range(0, len(self.parts), 2):
            out = torch.bmm(found[-1], self.parts[k]).add_(self.parts[k + 1])
            found.append(out if k == last else out.relu_())
        return found

    def gradient(self, seen: Sequence[Tensor], d: Float[Tensor, "R N outputs"]) -> list[Tensor]:
        """The gradients of all parts, for a gradient in the outputs."""
        found: list[Tensor] = []
        for k in reversed(range(0, len(self.parts), 2)):
            found += [d.sum(1, keepdim=True), torch.bmm(seen[k // 2].mT, d)]
            if k:  # transposed first: as a transposed operand it takes some processors three times as long
                back = torch.bmm(d, self.parts[k].mT.contiguous())
                d = torch.ops.aten.threshold_backward(back, seen[k // 2], 0)
        return found[::-1]

    def descend(self, rate: Float[Tensor, "R"], along: Sequence[Tensor]) -> None:
        """One step of every run, at its own rate."""
        for part, direction in zip(self.parts, along, strict=True):
            part.addcmul_(rate[:, None, None], direction, value=-1)

    def signs(self, seen: Sequence[Tensor]) -> list[Bool[Tensor, "R N units"]]:
        """Which units are active."""
        return [h > 0 for h in seen[1:-1]]

    def of(self, runs: Int64[Tensor, "kept"]) -> Stack:
        """Some of the runs."""
        return Stack(self.sizes, self.flat[runs])

    def network(self, run: int) -> nn.Sequential:
        """One run as a module."""
        modules: list[nn.Module] = []
        for weight, bias in zip(self.parts[::2], self.parts[1::2], strict=True):
            layer = nn.Linear(weight.shape[1], weight.shape[2], dtype=weight.dtype)
            with torch.no_grad():
                layer.weight.copy_(weight[run].mT)
                layer.bias.copy_(bias[run, 0])
            modules += [layer, nn.ReLU()]
        return nn.Sequential(*modules[:-1])


def cross_entropy_gradient(f: Float[Tensor, "R N classes"], y: Int64[Tensor, "R N"]) -> Float[Tensor, "R N classes"]:
    """Of the mean over examples."""
    d = f.softmax(-1)
    d.scatter_add_(2, y.unsqueeze(2), torch.full_like(d[..., :1], -1.0))
    return d.div_(f.shape[1])


def cross_entropy(f: Float[Tensor, "R N classes"], y: Int64[Tensor, "R N"]) -> Float[Tensor, "R N"]:
    """Of each example."""
    return f.logsumexp(-1) - f.gather(2, y.unsqueeze(2)).squeeze(2)
