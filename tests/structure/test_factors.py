"""The two factors: K-FAC's own, with and without the bias column, and how positions are counted."""

import pytest
import torch
from hessian_models import CLASSES, batch, convolutional, images, in_parts, mlp, relative
from torch.nn import functional as F

import layerwise as lw
from layerwise.structure import decoupled, input_mean, input_moment, output_hessian


@pytest.mark.parametrize("layer", ["0", "3", "6"])
def test_the_matrix_is_that_of_kfac(layer):
    """Of a convolution, a grouped one and a linear layer: the same numbers, not another implementation."""
    net, data = convolutional(), in_parts(images(), 2)
    kfac = lw.fisher(net, data, structure="kfac", estimator="exact")
    K = decoupled(net, data, layer, bias=True)
    assert relative(K.operator.G * K.positions, kfac.operators[layer].G) <= 1e-14
    assert relative(K.operator.A.values / K.positions, kfac.operators[layer].A.values) <= 1e-14
    assert relative(K.dense(), kfac.operators[layer].as_matrix()) <= 1e-13
    alone = decoupled(net, data, layer)
    assert torch.equal(alone.S, K.S[..., :-1, :-1])
    assert torch.equal(alone.M, K.M)


def test_factors_of_a_linear_layer():
    net, (x, y) = mlp(), batch()
    hidden = net[:2](x).detach()
    p = net(x).detach().softmax(-1)
    A = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    masks = [(net[: i + 1](x) > 0).double() for i in (0, 2)]
    W = [net[i].weight.detach() for i in (0, 2, 4)]
    G = torch.einsum("co,no->nco", W[2], masks[1])
    M = torch.einsum("nco,ncd,ndp->op", G, A, G) / len(x)
    assert relative(output_hessian(net, (x, y), "2"), M) <= 1e-12
    assert relative(input_moment(net, (x, y), "2"), hidden.mT @ hidden / len(x)) <= 1e-12
    assert relative(input_mean(net, (x, y), "2"), hidden.mean(0)) <= 1e-12
    last = output_hessian(net, (x, y), "4")
    assert relative(last, A.mean(0)) <= 1e-12
    assert float(torch.linalg.eigvalsh(last)[0].abs()) <= 1e-12  # rank c − 1, exactly


def test_means_of_convolutions_are_over_positions():
    """(C.20–27): M is a mean over positions, S a sum."""
    net, (x, y) = convolutional(), images()
    patches = F.unfold(x, 3, padding=1)  # N n P
    K = decoupled(net, (x, y), "0")
    assert K.positions == 36
    assert relative(K.S, torch.einsum("nip,njp->ij", patches, patches) / len(x)) <= 1e-12
    assert relative(K.mean, patches.mean((0, 2))) <= 1e-12
    reduced = decoupled(net, (x, y), "0", sharing="reduce")
    assert reduced.positions == 1
    assert relative(reduced.S, patches.mean(2).mT @ patches.mean(2) / len(x)) <= 1e-12


def test_masked_positions_do_not_count():
    net = mlp()
    x, y = torch.rand(4, 3, 6, dtype=torch.float64), torch.randint(CLASSES, (4, 3))
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1]]).bool()
    K = decoupled(net, (x, y, mask), "0")
    assert K.positions == 2
    assert relative(K.mean, x[mask].mean(0)) <= 1e-12
    assert relative(K.S / K.positions, x[mask].mT @ x[mask] / 8) <= 1e-12


@pytest.mark.parametrize("layer", ["0", "3"])
def test_leading_pairs_by_a_heap(layer):
    K = decoupled(convolutional(), images(), layer)
    truth = torch.linalg.eigvalsh(K.dense()).flip(0)
    k = K.numel()
    assert torch.allclose(K.eigenvalues(k), truth, atol=1e-12 * float(truth[0]))
    values, vectors, residuals = K.eigenpairs(7)
    assert torch.allclose(values, truth[:7])
    assert torch.allclose(vectors.mT @ vectors, torch.eye(7, dtype=torch.float64), atol=1e-12)
    assert (residuals <= 1e-12 * truth[0]).all()
    assert relative(K.dense() @ vectors, vectors * values) <= 1e-12
    assert float(K.norm()) == pytest.approx(float(truth[0]))
    assert float(K.trace()) == pytest.approx(float(truth.sum()))
    assert float(K.frobenius()) == pytest.approx(float(truth.norm()))


def test_sums_of_single_precision_are_kept_in_double():
    net, (x, y) = mlp().float(), batch()
    M = output_hessian(net, (x.float(), y), "2")
    assert M.dtype == torch.float64
    assert relative(M, output_hessian(net.double(), (x, y), "2")) <= 1e-5
