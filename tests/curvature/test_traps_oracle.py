"""Models that are easily got wrong without a word: each against factors or matrices computed by hand."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import close, root_cotangents, rows_of
from torch import Tensor, nn

import layerwise as lw
from layerwise.testing import oracles
from layerwise.testing.cases import case


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diag", "quasidiag", "block", "dense"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.usefixtures("untyped")
def test_linear_layers_on_sequences_are_pointwise_convolutions_exact(structure: str, sharing: str):
    found = []
    for name in ("sequence_linear", "sequence_conv"):
        c = case(name)
        model, x, y = c.make()
        options: Any = {**c.options, "sharing": sharing}
        found.append(lw.fisher(model, (x, y), "categorical", structure, "exact", **options).to_dense())
    # Reduced factors of three examples are singular: EKFAC's basis is open there, its trace is not.
    if (structure, sharing) == ("ekfac", "reduce"):
        found = [M.trace() for M in found]
    close(*found)


def _by_hand(name: str, layer: str) -> tuple[Any, Tensor, Tensor]:
    c = case(name)
    model, x, y = c.make()
    K: Any = lw.fisher(model, (x, y), structure="kfac", estimator="exact")
    rows = rows_of(model, x, root_cotangents(c, model, x, y), list(K.table.layers), len(y))[layer]
    A, G = rows.factors()
    return K.operators[layer], A, G


@pytest.mark.parametrize(
    ("name", "layer", "calls"),
    [("repeated_linear", "cell", 2), ("repeated_conv", "cell", 3), ("tied_weights_and_biases", "0", 2)],
)
def test_calls_of_a_shared_layer_are_positions_oracle(name: str, layer: str, calls: int):
    """A over all calls, G summed over them; the exact block sums gradients before squaring."""
    c = case(name)
    model, x, y = c.make()
    K: Any = lw.fisher(model, (x, y), structure="kfac", estimator="exact")
    seen = rows_of(model, x, root_cotangents(c, model, x, y), list(K.table.layers), len(y))[layer]
    assert seen.a.shape[1] % calls == 0
    A, G = seen.factors()
    close(K.operators[layer].A.dense(), A)
    close(K.operators[layer].G, G)
    block = lw.fisher(model, (x, y), structure="block", estimator="exact").layer(layer).to_dense()
    gradients = torch.einsum("vnso,nsi->vnoi", seen.g[:, :, :, 0], seen.a[:, :, 0]) if seen.a.shape[2] == 1 else None
    assert gradients is not None
    # Weight first, then bias, as in flat order.
    flat = torch.cat([gradients[..., :-1].flatten(2), gradients[..., -1]], -1).flatten(0, 1)
    close(block, flat.mT @ flat / len(y))


def test_grouped_convolutions_have_factors_of_each_group_oracle():
    c = case("conv2d_grouped")
    model, x, y = c.make()
    K: Any = lw.fisher(model, (x, y), structure="kfac", estimator="exact")
    conv = model[0]
    f_grads = rows_of(model, x, root_cotangents(c, model, x, y), list(K.table.layers), len(y))["0"].g
    for k in range(2):
        part = F.unfold(x[:, 2 * k : 2 * k + 2], 3, padding=1, stride=2).mT.flatten(0, 1)
        part = F.pad(part, (0, 1), value=1.0)
        close(K.operators["0"].A.dense()[k], part.mT @ part / len(part))
        g = f_grads[:, :, :, k].flatten(0, 2)
        close(K.operators["0"].G[k], g.mT @ g / len(y))
    assert K.operators["0"].shape == (2, conv.out_channels // 2, 19)


@pytest.mark.parametrize("estimator", ["exact", "empirical", "sampled"])
def test_class_weights_weigh_each_term_once_oracle(estimator: str):
    """F = 1/N Σ w_y J ᵀHJ; in the empirical matrix the weight is squared, since gradients carry it."""
    c = case("class_weights")
    model, x, y = c.make()
    w = c.options["weight"]
    F_ = lw.fisher(model, (x, y), structure="dense", estimator=estimator, samples=400, weight=w).to_dense()
    J, p = oracles.jacobian(model, x), oracles.outputs(model, x).softmax(-1)
    if estimator == "empirical":
        g = torch.einsum("nc,ncd->nd", p - F.one_hot(y, 3), J) * w[y].unsqueeze(1)
        close(F_, g.mT @ g / len(y))
        return
    H = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    expected = torch.einsum("n,nci,nck,nkj->ij", w[y], J, H, J) / len(y)
    close(F_, expected, 1e-9 if estimator == "exact" else 0.2)


def test_class_weights_agree_with_the_second_derivative_of_the_loss_oracle():
    c = case("class_weights")
    model, x, y = nn.Linear(4, 3).double(), *c.make()[1:]
    w = c.options["weight"]
    H = oracles.hessian(model, x, y, nn.CrossEntropyLoss(weight=w))
    terms = lw.ggn(model, (x, y), structure="dense", weight=w, normalize="terms")
    close(terms.to_dense(), H)


@pytest.mark.parametrize("structure", ["dense", "kfac", "ekfac", "diag"])
def test_ignored_labels_count_nowhere_oracle(structure: str):
    """Neither in the curvature, nor in the input factor, nor as an example of its own."""
    c = case("ignore_index")
    model, x, y = c.make()
    other = x.clone()
    other[y == -100] = 1e3  # what stands at ignored positions must not matter
    options: Any = {"structure": structure, "estimator": "exact"}
    found = lw.fisher(model, (x, y), ignore_index=-100, **options)
    close(found.to_dense(), lw.fisher(model, (other, y), ignore_index=-100, **options).to_dense())
    if structure != "kfac":
        close(found.trace(), oracles.fisher(model, x, y, ignore_index=-100).trace())


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_an_encoder_layer_has_a_hessian_and_a_ggn_oracle(mode: str):
    """The fused kernels of `nn.TransformerEncoderLayer` have no second derivative; the answer needs one."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, activation="gelu", batch_first=True)
    model = nn.Sequential(layer, nn.Linear(4, 3)).double().train(mode == "train")
    x, y = torch.randn(3, 4, 4).double(), torch.randint(3, (3, 4))

    def loss(f: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(f.mT, y)

    v = torch.randn(oracles.flat_parameters(model).numel(), dtype=torch.float64)
    H = lw.hessian(model, (x, y), loss=loss, structure="implicit")
    close(H @ v, oracles.hessian(model, x, y, loss) @ v)
    G = oracles.fisher(model, x, y)
    for structure in ("dense", "lowrank", "implicit"):
        close(lw.ggn(model, (x, y), structure=structure) @ v, G @ v)
    close(lw.ggn(model, (x, y), structure="ekfac").trace(), G.trace())


@pytest.mark.parametrize("structure", ["dense", "block", "diag", "quasidiag", "kfac", "ekfac", "lowrank"])
@pytest.mark.parametrize("estimator", ["exact", "empirical"])
@pytest.mark.usefixtures("untyped")
def test_an_activation_in_place_changes_nothing_exact(structure: str, estimator: str):
    """ReLU(inplace=True) overwrites the output that a hook has seen."""
    found = []
    for name in ("relu", "inplace_relu"):
        model, x, y = case(name).make()
        found.append(lw.fisher(model, (x, y), structure=structure, estimator=estimator).to_dense())
    close(*found)


@pytest.mark.parametrize("structure", ["dense", "kfac", "ekfac", "diag"])
def test_the_mean_is_over_examples_and_not_over_batches_oracle(structure: str):
    """Uneven batches weigh as many examples as they have."""
    model, x, y = case("mlp").make()
    loader = [(x[:3], y[:3]), (x[3:], y[3:])]
    options: Any = {"structure": structure, "estimator": "exact"}
    close(lw.fisher(model, loader, **options).to_dense(), lw.fisher(model, (x, y), **options).to_dense())


def test_a_sequence_is_one_example_and_its_positions_are_not_oracle():
    """Gradients of one sequence are summed before they are squared."""
    model, x, y = case("sequence_linear").make()
    g = oracles.gradients(model, x, y)
    found = lw.fisher(model, (x, y), structure="diag", estimator="empirical").diagonal().flat()
    close(found, g.square().mean(0))
