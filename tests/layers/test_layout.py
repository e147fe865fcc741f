"""`Layout`: where the examples are, in every arrangement of the leading axes."""

import pytest
import torch
from torch import Tensor

from layerwise.layers.capture.verify import _follows
from layerwise.layers.io.layer_io import Layout, candidates

N, T = 3, 4


def _examples_first() -> Tensor:
    return torch.arange(float(N * T * 2)).view(N, T, 2)


LAYOUTS = {
    "batch_first": (Layout(0), lambda x: x),
    "time_first": (Layout(1), lambda x: x.transpose(0, 1)),
    "merged_major": (Layout(0, "major"), lambda x: x.flatten(0, 1)),
    "merged_minor": (Layout(0, "minor"), lambda x: x.transpose(0, 1).flatten(0, 1)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_front_brings_the_examples_first(name: str):
    layout, arrange = LAYOUTS[name]
    x = _examples_first()
    raw = arrange(x)
    assert torch.equal(layout.front(raw, raw.ndim - 1, N), x)
    several = torch.stack([raw, 2 * raw])
    assert torch.equal(layout.front(several, raw.ndim - 1, N, offset=1), torch.stack([x, 2 * x]))


@pytest.mark.parametrize("name", LAYOUTS)
def test_narrow_keeps_the_layout(name: str):
    layout, arrange = LAYOUTS[name]
    x = _examples_first()
    raw = arrange(x)
    assert torch.equal(layout.narrow(raw, 1, 3, N), arrange(x[1:3]))
    assert torch.equal(layout.narrow(raw.unsqueeze(0), 0, 1, N, offset=1)[0], arrange(x[:1]))


def test_sizes_that_cannot_hold_the_examples_do_not_fit():
    assert Layout(0).fits((N, T), N)
    assert not Layout(1).fits((N, T), N)
    assert not Layout(2).fits((N, T), N)
    assert not Layout(0).fits((0, T), 0)
    assert Layout(0, "major").fits((N * T,), N)
    assert not Layout(0, "major").fits((N * T + 1,), N)
    assert not Layout(0, "major").fits((N,), N)  # nothing is merged into it


def test_candidates_put_the_likely_axis_first():
    assert list(candidates((N, N), N)) == [Layout(0), Layout(1)]
    assert list(candidates((N, N), N, first=1)) == [Layout(1), Layout(0)]
    assert list(candidates((N, 2 * N), N)) == [Layout(0), Layout(1, "major"), Layout(1, "minor")]
    assert list(candidates((5,), N)) == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_only_the_right_layout_follows_the_examples_scales(name: str):
    layout, arrange = LAYOUTS[name]
    scales = 2.0 ** torch.arange(N, dtype=torch.float64)
    rows = torch.ones(N, T, dtype=torch.float64)
    raw, scaled = arrange(rows), arrange(rows * scales.unsqueeze(1))
    assert _follows(raw, scaled, layout, N, scales, torch.float64)
    others = [other for other in candidates(tuple(raw.shape), N) if other != layout]
    assert not any(_follows(raw, scaled, other, N, scales, torch.float64) for other in others)
