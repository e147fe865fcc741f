"""`RecordedIO` and `Standard`: moments and sums by every route, against per-example gradients and loops."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from layerwise.foundations.likelihoods import Gaussian
from layerwise.layers.capture.recorder import Batch, ModelRecorder
from layerwise.layers.io.half_precision import half_chunks, was_half
from layerwise.layers.io.layer_io import RecordedIO
from layerwise.layers.io.one_hot import OneHot
from layerwise.layers.io.standard import Gradients, Standard
from layerwise.layers.table import LayerTable
from layerwise.testing import case

NAMES = ["mlp", "sequence_linear", "conv2d_grouped", "embedding", "layer_norm", "repeated_lengths", "time_first_inside"]


def _ios(name: str, chunk_bytes: int | None = None, mask: Tensor | None = None) -> dict[str, RecordedIO]:
    model, x, _ = case(name).make()
    options = {} if chunk_bytes is None else {"chunk_bytes": chunk_bytes}
    recorder = ModelRecorder(model, LayerTable.from_model(model), **options)
    with recorder.session():
        recorded = recorder.record(Batch(x, None, mask, 0), Gaussian(), batched=True)
        drawn = torch.randn(2, *recorded.terms.f.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        found = recorded.all_layers(drawn, last=True)
    return {name: io for name, io in found.items() if isinstance(io, RecordedIO)}


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and float((a - b).abs().max()) < 1e-10


@pytest.mark.parametrize("name", NAMES)
def test_a_few_examples_at_a_time_give_the_same(name: str):
    for whole, chunked in zip(_ios(name).values(), _ios(name, chunk_bytes=1).values(), strict=True):
        assert len(list(chunked.chunks())) == chunked.examples
        assert len(list(whole.chunks())) == 1
        assert _close(whole.rows(), chunked.rows())
        assert _close(whole.grad(), chunked.grad())
        for key in ("squared_sum", "outer_sum", "group_outer_sum"):
            totals = [torch.stack([getattr(c, key)() for c in io.chunks()]).sum(0) for io in (whole, chunked)]
            assert _close(*totals)
        if whole.spec.form.weight is not None:
            (A, rows), (B, again) = whole.input_moment(), chunked.input_moment()
            assert rows == again
            assert _close(A, B)
        assert _close(whole.narrow(1, 3).rows(), whole.rows()[:, 1:3])


@pytest.mark.parametrize("name", NAMES)
def test_shortcuts_equal_what_per_example_gradients_say(name: str):
    for io in _ios(name).values():
        chunk = io.standard()
        plain = Gradients(io.rows())
        assert _close(chunk.grad(), plain.grad())
        assert _close(chunk.squared_sum(), plain.squared_sum())
        if not isinstance(chunk.a, OneHot):
            assert _close(chunk.bias_cross_sum(), plain.bias_cross_sum())
        rows = io.rows().flatten(0, 1)
        assert _close(chunk.outer_sum(), rows.flatten(1).mT @ rows.flatten(1))
        blocks = torch.stack([rows[:, k].flatten(1).mT @ rows[:, k].flatten(1) for k in range(rows.shape[1])])
        assert _close(chunk.group_outer_sum(), blocks)


@pytest.mark.parametrize("name", NAMES)
def test_rotated_squares_by_both_orders_of_rotation(name: str):
    generator = torch.Generator().manual_seed(1)
    for io in _ios(name).values():
        k, o, i = io.spec.form.shape
        U_A = torch.linalg.qr(torch.randn(k, i, i, generator=generator, dtype=torch.float64)).Q
        U_G = torch.linalg.qr(torch.randn(k, o, o, generator=generator, dtype=torch.float64)).Q
        chunk, one_hot = io.standard(), io.spec.form.one_hot
        rotated = torch.einsum("kop,vnkoi,kij->vnkpj", U_G, io.rows(), torch.eye(i).double().expand(k, i, i))
        if not one_hot:
            full = torch.einsum("vnkpi,kij->vnkpj", rotated, U_A)
            assert _close(chunk.rotated_squared_sum(U_A, U_G), full.square().sum((0, 1)))
        assert _close(chunk.rotated_squared_sum(None, U_G), rotated.square().sum((0, 1)))


@pytest.mark.parametrize("s", [1, 50])
def test_both_orders_of_rotation_are_taken(s: int):
    """With one position inputs are rotated first, with many the gradient; both give one answer."""
    a, g = torch.randn(3, s, 2, 4, dtype=torch.float64), torch.randn(2, 3, s, 2, 3, dtype=torch.float64)
    U_A = torch.linalg.qr(torch.randn(2, 4, 4, dtype=torch.float64)).Q
    U_G = torch.linalg.qr(torch.randn(2, 3, 3, dtype=torch.float64)).Q
    grads = torch.einsum("vnsko,nski,kop,kij->vnkpj", g, a, U_G, U_A)
    assert _close(Standard(a, g).rotated_squared_sum(U_A, U_G), grads.square().sum((0, 1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("s", [1, 3, 50])
def test_rotated_squares_of_half_precision(s: int, dtype: torch.dtype):
    """Products in bfloat16, sums in float32: by every order, near the float64 value."""
    a, g = torch.randn(3, s, 2, 9).to(dtype), torch.randn(2, 3, s, 2, 7).to(dtype)
    U_A, U_G = (torch.linalg.qr(torch.randn(2, n, n, dtype=torch.float64)).Q for n in (9, 7))
    for U in (U_A, None):
        exact = Standard(a.double(), g.double()).rotated_squared_sum(U, U_G)
        found = Standard(a, g).rotated_squared_sum(None if U is None else U.float(), U_G.float())
        assert found.dtype == torch.float32
        assert found.shape == exact.shape
        assert float((found - exact).norm() / exact.norm()) < 1e-2
    wide_A, wide_G = (torch.block_diag(U[0].float(), torch.eye(3)).unsqueeze(0) for U in (U_A, U_G))
    narrow = Standard(a[:, :, :1], g[:, :, :, :1])
    padded, exact = narrow.rotated_squared_sum(wide_A, wide_G), narrow.rotated_squared_sum(wide_A[:, :9, :9], U_G[:1])
    assert torch.allclose(padded[:, :7, :9], exact, rtol=3e-2, atol=1e-2)
    assert not padded[:, 7:].any()
    assert not padded[:, :, 9:].any()


def test_rotated_squares_of_half_precision_on_indices():
    a, g = OneHot(torch.tensor([[1, 0, 1, -1], [3, 3, 2, 0]]), 5), torch.randn(2, 2, 4, 1, 7).bfloat16()
    U_G = torch.linalg.qr(torch.randn(1, 7, 7)).Q
    exact = Standard(a, g.float()).rotated_squared_sum(None, U_G)
    found = Standard(a, g).rotated_squared_sum(None, U_G)
    assert found.dtype == torch.float32
    assert float((found - exact).norm() / exact.norm()) < 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_records_in_half_precision(name: str):
    """The same standard form, rounded, in chunks of twice as many examples."""
    for io in _ios(name, chunk_bytes=1).values():
        assert not was_half(io)
        chunks = list(half_chunks(io))
        assert len(chunks) == io.examples
        for half, whole in zip(chunks, io.chunks(), strict=True):
            assert torch.equal(half.g, whole.g.bfloat16())
            if isinstance(whole.a, OneHot):
                assert isinstance(half.a, OneHot)
                assert torch.equal(half.a.index, whole.a.index)
            else:
                assert isinstance(half.a, Tensor)
                assert half.a.dtype == torch.bfloat16
                assert float((half.a - whole.a).abs().max()) <= 1e-2 * float(whole.a.abs().max())
        calls = tuple(replace(call, x=_halved(call.x), dy=_halved(call.dy)) for call in io.calls)
        assert was_half(replace(io, calls=calls))
        rounded_on_the_way = tuple(replace(call, dy=_halved(call.dy)) for call in io.calls)  # as under autocast
        assert was_half(replace(io, calls=rounded_on_the_way))


def _halved(t: Tensor | None) -> Tensor | None:
    return t.bfloat16() if t is not None and t.is_floating_point() else t


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["sequence_linear", "time_first_inside"])
def test_moments_count_the_positions_that_count(name: str, masked: bool):
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]) == 1 if masked else None
    for io in _ios(name, mask=mask).values():
        chunk = io.standard()
        assert isinstance(chunk.a, Tensor)
        keep = torch.ones(3, 5, dtype=torch.bool) if mask is None else mask
        a, g = chunk.a[keep], chunk.g[:, keep].flatten(0, 1)
        moment, rows = io.input_moment()
        assert rows == int(keep.sum())
        assert _close(moment, torch.einsum("mki,mkj->kij", a, a))
        assert _close(io.output_moment(), torch.einsum("mko,mkp->kop", g, g))
        means = [chunk.a[n, keep[n]].mean(0) for n in range(3) if keep[n].any()]
        reduced = list(io.reduced_chunks())
        assert _close(torch.cat([r[0] for r in reduced]), torch.stack(means))
        sums = torch.stack([chunk.g[:, n, keep[n]].sum(1) for n in range(3)], dim=1)
        assert _close(torch.cat([r[1] for r in reduced], dim=1), sums)


def test_a_layer_with_another_number_of_positions_ignores_the_mask():
    """`repeated_lengths` calls one layer on 5 positions, then on 1; the output has one a example."""
    io = _ios("repeated_lengths")["0"]
    moment, rows = io.input_moment()
    assert rows == 3 * (5 + 1)
    a = io.standard().a
    assert isinstance(a, Tensor)
    assert _close(moment, torch.einsum("nski,nskj->kij", a, a))


def test_a_bias_alone_sees_ones():
    io = _ios("frozen_weight")["2"]
    chunk = io.standard()
    assert isinstance(chunk.a, Tensor)
    assert chunk.a.shape[-1] == 1
    assert bool((chunk.a == 1).all())
    assert _close(io.rows()[..., 0], chunk.g.sum(2))
