"""What the tests of this folder share: small models, dense references, and what must not change."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from error_sentences import WORDED
from layerwise.foundations.errors import LayerwiseError
from layerwise.testing import oracles
from layerwise.testing.cases import Case
from random_tensors import randn64

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
TYPED = ("mlp", "conv2d_grouped", "conv_transpose2d", "layer_norm", "embedding", "attention", "lstm")
"""Cases on which annotations are checked too: one for each kind of rule."""
gaussian = randn64


def name_of(c: Case) -> str:
    return c.name


def mlp(*sizes: int, seed: int = 0) -> nn.Sequential:
    """Tanh layers in float64, biases not zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [part for i, o in pairwise(sizes) for part in (nn.Linear(i, o), nn.Tanh())]
        return nn.Sequential(*layers[:-1]).double()


def convnet(seed: int = 0) -> nn.Sequential:
    """Two convolutions and a head, [N, 2, 6, 6] to [N, 3], in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        body = (nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3), nn.Tanh())
        return nn.Sequential(*body, nn.Flatten(), nn.Linear(48, 3)).double()


def some(x: Any, start: int, stop: int) -> Any:
    """Some examples of an input, where they are the first axis of every tensor."""
    if isinstance(x, Mapping):
        return {k: v[start:stop] for k, v in x.items()}
    return tuple(v[start:stop] for v in x) if isinstance(x, tuple) else x[start:stop]


def count(x: Any) -> int:
    first = next(iter(x.values())) if isinstance(x, Mapping) else x[0] if isinstance(x, tuple) else x
    return len(first)


def features(model: nn.Module, x: Any) -> Tensor:
    """The dense Jacobian ``[N·P, d]`` by autodiff alone, example-major."""
    return oracles.jacobian(model, x).flatten(0, -2)


def relative(found: Any, expected: Any, scale: float = 0.0) -> float:
    """‖found − expected‖ / max(‖expected‖, scale), and infinite where shapes differ or something is not finite."""
    found, expected = (torch.as_tensor(t, dtype=torch.float64).detach() for t in (found, expected))
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return math.inf
    return float((found - expected).norm() / expected.norm().clamp_min(max(scale, 1e-300)))


def close(found: Any, expected: Any, tolerance: float = 1e-10, scale: float = 0.0) -> None:
    error = relative(found, expected, scale)
    assert error <= tolerance, f"relative error {error:.2e}, {np.shape(found)} and {np.shape(expected)}"


def align(found: Tensor, expected: Tensor) -> Tensor:
    """Columns of the first with the signs of the second."""
    return found * torch.sign((found * expected).flatten(0, -2).sum(0))


# --- what must not change ---------------------------------------------------------------------------------


def _bits(t: Tensor | None) -> Any:
    return None if t is None else (t.dtype, t.detach().clone().reshape(-1).view(torch.uint8).tolist())


def snapshot(model: nn.Module) -> dict[str, Any]:
    named = list(model.named_modules())
    return {
        "parameters": {k: (id(p), _bits(p), _bits(p.grad), p.requires_grad) for k, p in model.named_parameters()},
        "buffers": {k: (id(b), _bits(b)) for k, b in model.named_buffers()},
        "training": {k: m.training for k, m in named},
        "hooks": {(k, h): list(getattr(m, h)) for k, m in named for h in HOOKS},
        "attributes": {k: {a: id(v) for a, v in vars(m).items()} for k, m in named},
        "random": torch.get_rng_state().tolist(),
        "attention fast path": torch.backends.mha.get_fastpath_enabled(),
        "grad mode": torch.is_grad_enabled(),
    }


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    before = snapshot(model)
    yield
    after = snapshot(model)
    for what in before:
        assert before[what] == after[what], what


@contextmanager
def refused(error: type[LayerwiseError], *words: str) -> Iterator[None]:
    """The error, worded as all are."""
    with pytest.raises(LayerwiseError) as caught:
        yield
    message = str(caught.value)
    assert isinstance(caught.value, error), repr(caught.value)
    assert re.search(WORDED, message), message
    for word in words:
        assert word in message, message
