"""The full network's leading eigenvectors from one small matrix."""

import pytest
import torch
from hessian_models import batch, convolutional, images, in_parts, mlp, relative

import layerwise as lw
from layerwise.foundations.errors import InputError
from layerwise.structure import full_network, input_mean, output_hessian, overlap


def constant_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Every layer's input is the same for all examples; labels are not looked at."""
    return torch.rand(1, 6, dtype=torch.float64).expand(8, -1), torch.zeros(8).long()


def test_weighted_is_exact_for_constant_inputs_and_plain_is_not():
    net, data = mlp(), constant_inputs()
    truth = lw.ggn(net, data, structure="dense").to_dense()
    values, vectors = torch.linalg.eigh(truth)
    found = full_network(net, data, weighted=True).eigenpairs(3)
    assert relative(found.values, values[-3:].flip(0)) <= 1e-10
    assert float(overlap(found.vectors, vectors[:, -3:])) == pytest.approx(1, abs=1e-10)
    assert relative(truth @ found.vectors, found.vectors * found.values) <= 1e-10
    assert float(found.residuals.max()) <= 1e-10
    plain = full_network(net, data).eigenpairs(3)
    assert relative(plain.values, found.values) > 1e-3


def test_plain_is_exact_too_where_all_means_have_one_length():
    net, data = mlp(bias=False), constant_inputs()
    means = [torch.linalg.vector_norm(input_mean(net, data, layer)) for layer in ("0", "2", "4")]
    with torch.no_grad():  # scale what comes out of a layer by what its input has less
        net[0].weight.mul_(means[0] / means[1])
        net[2].weight.mul_(means[1] / means[2])
    values = torch.linalg.eigvalsh(lw.ggn(net, data, structure="dense").to_dense())[-3:].flip(0)
    assert relative(full_network(net, data).eigenpairs(3).values, values) <= 1e-10


def test_blocks_are_those_of_single_layers():
    net, data = mlp(), batch()
    found = full_network(net, in_parts(data, 5))
    assert found.layers == ["0", "2", "4"]
    assert relative(found.M[5:10, 5:10], output_hessian(net, data, "2")) <= 1e-12
    assert relative(found.means["2"], input_mean(net, data, "2", bias=True)) <= 1e-12
    pairs = found.eigenpairs(5)
    assert torch.allclose(pairs.vectors.mT @ pairs.vectors, torch.eye(5, dtype=torch.float64), atol=1e-10)


def test_leading_pairs_of_a_network_on_data():
    net, data = mlp(), batch(40)
    truth = lw.ggn(net, data, structure="dense").eigenvalues(3).flip(0)
    assert relative(full_network(net, data, weighted=True).eigenpairs(3).values, truth) <= 0.1


def test_which_layers_take_part():
    found = full_network(convolutional(), images())  # the grouped convolution does not
    assert found.layers == ["0", "6"]
    assert found.eigenpairs(2).vectors.shape == (found.numel(), 2)
    with pytest.raises(InputError, match="k=30"):
        full_network(mlp(), batch()).eigenpairs(30)


def test_leading_pairs_are_in_order_where_layers_have_means_of_other_sizes():
    net, (x, y) = mlp(), batch()
    with torch.no_grad():
        net[0].weight.mul_(0.01)
    found = full_network(net, (100 * x.abs(), y))
    values = found.eigenpairs(len(found.M)).values
    assert torch.equal(values, values.sort(descending=True).values)
    torch.testing.assert_close(found.eigenpairs(2).values, values[:2])


def test_a_layer_whose_mean_input_is_zero():
    net = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False), torch.nn.ReLU(), torch.nn.Linear(3, 3)).double()
    x = torch.cat([torch.eye(4), -torch.eye(4)]).double()
    for weighted in (True, False):
        values, vectors, _ = full_network(net, (x, torch.arange(8) % 3), weighted=weighted).eigenpairs(2)
        assert torch.isfinite(values).all()
        torch.testing.assert_close(vectors.mT @ vectors, torch.eye(2, dtype=torch.float64))
