"""The layer Hessian against `torch.func`, and the choice between it and the Gauss–Newton matrix."""

import copy

import pytest
import torch
from hessian_models import (
    CLASSES,
    Attention,
    batch,
    convolutional,
    gauss_newton_of,
    hessian_of,
    images,
    in_parts,
    mlp,
    relative,
)
from torch import nn

import layerwise as lw
from layerwise.foundations.errors import InputError, MemoryBudgetError
from layerwise.optim.cuda.linalg import split_fp16
from layerwise.structure import decoupled, eigenpairs, gauss_newton, layer_hessian, operator
from layerwise.structure.pieces import Factored, Written


@pytest.mark.parametrize("layer", ["0", "2", "4"])
def test_identity_of_card_h1(layer):
    """E[M_x ⊗ x xᵀ] is the Hessian of a piecewise-linear network, block by block."""
    net, data = mlp(), batch()
    truth = hessian_of(net, data, f"{layer}.weight")
    H = layer_hessian(net, in_parts(data, 5), layer)
    eye = torch.eye(len(truth), dtype=torch.float64)
    assert relative(H.dense(), truth) <= 1e-10
    assert relative(H @ eye, truth) <= 1e-10
    assert float(H.trace()) == pytest.approx(float(truth.trace()), rel=1e-10)
    assert float(H.frobenius()) == pytest.approx(float(truth.norm()), rel=1e-10)
    assert H.agreement < 1e-10


def test_bias_is_the_last_column():
    net, data = mlp(), batch()
    H = layer_hessian(net, data, "2", bias=True)
    assert H.matrix_shape == (5, 6)
    D = H.dense().view(5, 6, 5, 6)
    assert relative(D[:, :-1, :, :-1].reshape(25, 25), hessian_of(net, data, "2.weight")) <= 1e-10
    assert relative(D[:, -1, :, -1], hessian_of(net, data, "2.bias")) <= 1e-10
    assert (
        relative(H.dense(), lw.ggn(net, data, structure="block").layer("2").to_dense()[_order()][:, _order()]) <= 1e-10
    )
    by_autograd = layer_hessian(net, data, "2", bias=True, gauss_newton=False)
    assert relative(by_autograd.dense(), H.dense()) <= 1e-10


def _order() -> torch.Tensor:
    """From weight and then bias to rows with the bias in the last column."""
    places = torch.cat([torch.arange(25).view(5, 5), torch.arange(25, 30).view(5, 1)], 1)
    return places.flatten()


@pytest.mark.parametrize(("layer", "shape"), [("0", (4, 18)), ("3", (6, 8)), ("6", (CLASSES, 24))])
def test_convolutions_are_exact(layer, shape):
    """(C.20): all terms between positions, and between groups, are in it."""
    net, data = convolutional(), images()
    H = layer_hessian(net, data, layer)
    assert H.matrix_shape == shape
    assert relative(H.dense(), hessian_of(net, data, f"{layer}.weight")) <= 1e-10


@pytest.mark.parametrize("form", [Factored, Written])
def test_both_forms_of_rows_of_a_convolution(form, monkeypatch):
    monkeypatch.setattr("layerwise.structure.pieces.is_cheaper_written", lambda chunk, vectors: form is Written)
    net, data = convolutional(), images()
    truth = hessian_of(net, data, "3.weight")
    H = layer_hessian(net, in_parts(data, 2), "3", gauss_newton=True)
    assert {type(piece) for piece in H.rows.pieces} == {form}
    assert relative(H @ torch.eye(len(truth), dtype=torch.float64), truth) <= 1e-10
    assert float(H.trace()) == pytest.approx(float(truth.trace()), rel=1e-10)


@pytest.mark.parametrize("layer", ["embedding", "attention.q", "head"])
def test_positions_of_a_transformer(layer):
    """Output positions are examples' terms, and the layer's positions interact: all cross terms are there."""
    net = Attention().double()
    data = torch.randint(CLASSES, (3, 3)), torch.randint(CLASSES, (3, 3))
    name = "attention.in_proj_weight" if layer == "attention.q" else f"{layer}.weight"
    truth = {True: gauss_newton_of(net, data, name), False: hessian_of(net, data, name)}
    if layer == "embedding":  # stored [vocabulary, entries]
        order = torch.arange(16).view(CLASSES, 4).mT.flatten()
        truth = {kind: T[order][:, order] for kind, T in truth.items()}
    assert relative(truth[False], truth[True]) > 0.1 or layer == "head"
    for kind, T in truth.items():
        H = layer_hessian(net, data, layer, gauss_newton=kind)
        rows = slice(0, 16)
        assert relative(H @ torch.eye(16, dtype=torch.float64), T[rows, rows]) <= 1e-10


def test_two_matrices_are_never_taken_for_one():
    net, data = mlp(activation=nn.Tanh), batch()
    with pytest.raises(InputError, match="gauss_newton=True or gauss_newton=False"):
        layer_hessian(net, data, "2")
    chosen = {kind: layer_hessian(net, data, "2", gauss_newton=kind) for kind in (True, False)}
    assert relative(chosen[True].dense(), gauss_newton_of(net, data, "2.weight")) <= 1e-10
    assert relative(chosen[False].dense(), hessian_of(net, data, "2.weight")) <= 1e-10
    assert relative(chosen[True].dense(), chosen[False].dense()) > 1e-2
    assert layer_hessian(net, data, "4").agreement < 1e-10  # the last layer is linear


def test_a_loss_at_its_minimum_does_not_hide_second_derivatives():
    """There the two matrices are nearly the same, by the labels alone."""
    net, (x, _) = mlp(activation=nn.Tanh), batch()
    y = net(x).detach()  # a residual of zero
    true, plain = (layer_hessian(net, (x, y), "2", "gaussian", gauss_newton=kind).dense() for kind in (False, True))
    assert relative(true, plain) <= 1e-10
    with pytest.raises(InputError, match="not linear"):
        layer_hessian(net, (x, y), "2", "gaussian")


def test_a_weight_used_twice_asks_for_a_choice():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.inner(torch.relu(self.inner(x)))))

    net, data = Twice().double(), batch()
    with pytest.raises(InputError, match="used twice"):
        layer_hessian(net, data, "inner")
    H = layer_hessian(net, data, "inner", gauss_newton=True)
    assert relative(H.dense(), gauss_newton_of(net, data, "inner.weight")) <= 1e-10
    assert decoupled(net, data, "inner").positions == 2


def test_without_labels_and_divided_by_terms():
    net, (x, y) = mlp(), batch()
    assert relative(layer_hessian(net, x, "2").dense(), layer_hessian(net, (x, y), "2").dense()) <= 1e-12
    weight = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
    options = {"weight": weight, "normalize": "terms"}
    whole = layer_hessian(net, (x, y), "2", weight=weight).dense() * len(x) / weight[y].sum()
    assert relative(layer_hessian(net, (x, y), "2", **options).dense(), whole) <= 1e-12


def test_rows_that_do_not_fit_are_made_anew():
    net, data = mlp(), batch()
    parts = in_parts(data, 5)
    kept, streamed = layer_hessian(net, parts, "2"), layer_hessian(net, parts, "2", memory=3000)
    assert (kept.stored, streamed.stored) == (True, False)
    V = torch.randn(25, 3, dtype=torch.float64)
    assert relative(streamed @ V, kept @ V) <= 1e-12
    assert float(streamed.trace()) == pytest.approx(float(kept.trace()), rel=1e-12)
    pairs, truth = streamed.eigenpairs(3), kept.eigenpairs(3)
    assert torch.allclose(pairs.values, truth.values, rtol=1e-8)
    with pytest.raises(MemoryBudgetError, match="iterated again"):
        layer_hessian(net, iter(parts), "2", memory=3000)


def test_a_generator_is_enough_where_rows_fit():
    net, data = mlp(), batch()
    H = layer_hessian(net, iter(in_parts(data, 5)), "0")
    assert relative(H.dense(), hessian_of(net, data, "0.weight")) <= 1e-10


def test_rows_do_not_change_with_the_batch_they_were_made_of():
    net, (x, y) = mlp(bias=False), batch()
    H = layer_hessian(net, (x, y), "0")
    before = H.dense()
    x.zero_()
    assert relative(H @ torch.eye(30, dtype=torch.float64), before) <= 1e-12


@pytest.mark.parametrize("memory", [None, 3000])
def test_products_in_inference_mode_and_autocast(memory):
    net, data = mlp(), batch()
    H = layer_hessian(net, in_parts(data, 5), "2", memory=memory)
    v = torch.randn(25, dtype=torch.float64)
    plain = H @ v
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert relative(H @ v, plain) <= 1e-12


@pytest.mark.parametrize("method", ["lanczos", "gram"])
def test_eigenpairs_against_a_full_decomposition(method):
    net, data = mlp(), batch(7)  # 21 rows, fewer than 25 entries
    H = layer_hessian(net, data, "2")
    truth, found = H.eigenpairs(6), H.eigenpairs(6, method=method)
    assert torch.allclose(found.values, truth.values, rtol=1e-7, atol=1e-12)
    assert (truth.values[:-1] >= truth.values[1:]).all()
    assert float(lw.structure.overlap(found.vectors, truth.vectors)) == pytest.approx(1, abs=1e-6)
    true = torch.linalg.vector_norm(H @ found.vectors - found.vectors * found.values, dim=0)
    assert (found.residuals <= 1e-6 * truth.values[0]).all()
    assert torch.allclose(found.residuals, true, atol=1e-12)


def test_more_pairs_than_rows():
    """Rows span a part of the space; the rest belongs to the eigenvalue 0."""
    H = layer_hessian(mlp(), batch(2), "2")
    found = H.eigenpairs(12, method="gram")
    assert torch.allclose(found.values[6:], torch.zeros(6, dtype=torch.float64), atol=1e-12)
    gram = found.vectors.mT @ found.vectors
    assert torch.allclose(gram, torch.eye(12, dtype=torch.float64), atol=1e-8)


def test_few_pairs_of_a_large_matrix_are_as_exact(monkeypatch):
    values = torch.logspace(0, -8, 60, dtype=torch.float64)
    Q = torch.linalg.qr(torch.randn(60, 60, dtype=torch.float64)).Q
    matrix = (Q * values) @ Q.mT
    monkeypatch.setattr(eigenpairs, "WHOLE", 10)
    found = eigenpairs.dense_pairs(matrix, 3)
    assert torch.allclose(found.values, values[:3], rtol=1e-12)
    assert torch.allclose((found.vectors.mT @ Q[:, :3]).abs(), torch.eye(3, dtype=torch.float64), atol=1e-9)


def test_the_method_follows_the_sizes(monkeypatch):
    H = layer_hessian(mlp(), batch(7), "2")
    assert H._method(3) == "dense"
    monkeypatch.setattr(operator, "DENSE", 10)
    assert H._method(3) == "gram"
    monkeypatch.setattr(gauss_newton, "GRAM", 10)
    assert H._method(3) == "lanczos"


def test_a_random_forward_is_the_same_at_every_product():
    net, data = mlp(), batch()
    net.insert(2, nn.Dropout(0.5))
    net.train()
    before = torch.get_rng_state()
    kept, streamed = (layer_hessian(net, in_parts(data, 5), "3", memory=m) for m in (None, 3000))
    V = torch.randn(25, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert relative(streamed @ V, kept @ V) <= 1e-12
    assert torch.equal(torch.get_rng_state(), before)
    assert net.training


def test_half_precision_is_told_from_smooth():
    net, (x, y) = mlp(), batch()
    half = copy.deepcopy(net).bfloat16()
    assert layer_hessian(half, (x.bfloat16(), y), "2").dtype == torch.float32
    smooth = mlp(activation=nn.Tanh).bfloat16()
    with pytest.raises(InputError, match="gauss_newton"):
        layer_hessian(smooth, (x.bfloat16(), y), "2")


def test_right_hand_sides_keep_their_shape():
    H = layer_hessian(mlp(), batch(), "4")
    v = torch.randn(20, dtype=torch.float64)
    assert torch.equal((H @ v.view(CLASSES, 5)).flatten(), H @ v)
    assert torch.allclose((H @ v.unsqueeze(1))[:, 0], H @ v, rtol=1e-12)
    with pytest.raises(InputError, match="right-hand side"):
        H @ v[:-1]


def test_what_has_no_rule_has_a_hessian_all_the_same():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.scale = nn.Linear(6, CLASSES), nn.Parameter(torch.rand(CLASSES))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) * self.scale

    net, data = Scaled().double(), batch()
    truth = hessian_of(net, data, "scale")
    for kind in (None, False):
        assert relative(layer_hessian(net, data, "scale", gauss_newton=kind).dense(), truth) <= 1e-10

    class Twofold(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 2 * (x @ self.weight.mT)

    net = nn.Sequential(Twofold(6, CLASSES)).double()
    assert relative(layer_hessian(net, data, "0").dense(), hessian_of(net, data, "0.weight")) <= 1e-10


def test_products_of_pairs_of_halves():
    """22 bits, for tensor cores; here the same arithmetic on a CPU."""
    net, (x, y) = mlp().float(), batch()
    H = layer_hessian(net, (x.float(), y), "2")
    V = torch.randn(25, 4)
    plain = H @ V
    H.rows.multiply = split_fp16.product
    assert 0 < relative(H @ V, plain) <= 1e-5


def test_a_fitted_network_in_single_precision_needs_no_choice():
    """Its loss has hardly any curvature, and the rounding of that is no second derivative of the outputs."""
    net, (x, _) = mlp(), batch()
    net.float()
    with torch.no_grad():
        net[4].weight.mul_(200)
        fitted = net(x.float()).argmax(1)
    for layer in ("0", "2", "4"):
        assert layer_hessian(net, (x.float(), fitted), layer).agreement < 1e-3


def test_blank_examples_hide_no_smooth_activation():
    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).double()
    x, y = torch.randn(50, 6, dtype=torch.float64), torch.randint(3, (50,))
    x[:20] = 0
    with pytest.raises(InputError, match="a choice of matrix"):
        layer_hessian(net, (x, y), "0")
    x[20:29] = x[42:] = 0  # now all that is looked at is blank
    with pytest.raises(InputError, match="do not depend"):
        layer_hessian(net, (x, y), "0")


def test_more_copies_of_an_eigenvalue_than_lanczos_multiplies_columns():
    net, x = nn.Linear(30, 20, bias=False).double(), torch.randn(60, 30, dtype=torch.float64)
    H = layer_hessian(net, (x, torch.zeros(60, 20, dtype=torch.float64)), "Linear", "gaussian")
    values = H.eigenpairs(30, method="lanczos").values
    truth = torch.linalg.eigvalsh(x.T @ x / 60).flip(0).repeat_interleave(20)[:30]
    torch.testing.assert_close(values, truth, rtol=1e-6, atol=0)


def test_the_norm_of_an_indefinite_hessian():
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(20, 5, dtype=torch.float64)
    with torch.no_grad():
        net[0].bias.add_(1.0)
        wrong = net(x).argmin(1)
    values = torch.linalg.eigvalsh(hessian_of(net, (x, wrong), "0.weight"))
    H = layer_hessian(net, (x, wrong), "0", gauss_newton=False)
    assert -values[0] > values[-1]
    torch.testing.assert_close(H.norm(), -values[0])
