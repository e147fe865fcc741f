"""Recorded inputs and output gradients in bfloat16, for statistics that a GPU's tensor cores make."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from layerwise.foundations.types import HALF
from layerwise.layers.io.layer_io import RecordedIO
from layerwise.layers.io.standard import Standard


@dataclass(frozen=True)
class HalfIO(RecordedIO):
    """The same layer; its standard form is in bfloat16, which has the range of float32."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the standard form."""
        return torch.bfloat16


def was_half(io: RecordedIO) -> bool:
    """Whether a layer computed in half precision, so that its records lose nothing (float16: little) in bfloat16.

    Its output tells: inputs of single precision, such as a norm layer's under autocast, were rounded on their way in.
    """
    results = [call.x if call.dy is None else call.dy for call in io.calls]
    return all(t.dtype in HALF for t in results if t.is_floating_point())


def half_chunks(io: RecordedIO) -> Iterator[Standard]:
    """`RecordedIO.chunks` in bfloat16."""
    for part in io.parts(io._bytes_per_example(gradients=True) / 2):
        yield HalfIO(part.spec, part.calls, part.examples, part.mask, part.chunk_bytes).standard()
