"""Overlap, matricization, correspondence."""

import pytest
import torch
from hessian_models import batch, mlp

from layerwise.foundations.errors import InputError
from layerwise.structure import (
    correspondence,
    decoupled,
    layer_hessian,
    matricization,
    overlap,
    overlap_curve,
    random_overlap,
    rank_one_ness,
)


def orthonormal(d: int, k: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(d, k, dtype=torch.float64)).Q


def test_overlap_is_of_spaces_and_not_of_bases():
    U, V = orthonormal(12, 4), orthonormal(12, 4)
    turned = U @ orthonormal(4, 4)
    assert float(overlap(U, turned)) == pytest.approx(1)
    assert float(overlap(U, V)) == pytest.approx(float(overlap(turned, V)))
    cosines = torch.linalg.svdvals(U.mT @ V)  # of the principal angles
    assert float(overlap(U, V)) == pytest.approx(float(cosines.square().mean()))
    curve = overlap_curve(U, V)
    assert [float(v) for v in curve] == pytest.approx([float(overlap(U, V, k)) for k in range(1, 5)])


def test_random_spaces_have_the_random_baseline():
    found = torch.stack([overlap(orthonormal(20, 5), orthonormal(20, 5)) for _ in range(200)])
    assert abs(float(found.mean()) - random_overlap(5, 20)) <= 4 * float(found.std()) / 200**0.5


def test_matricization_is_row_major():
    W = torch.randn(3, 4)
    assert torch.equal(matricization(W.flatten(), (3, 4)), W)
    assert torch.equal(matricization(torch.stack([W.flatten(), 2 * W.flatten()], 1), (3, 4))[1], 2 * W)


def test_every_column_of_a_correspondence_sums_to_one():
    net, data = mlp(), batch()
    H, K = layer_hessian(net, data, "0"), decoupled(net, data, "0")
    h = H.eigenpairs(5).vectors
    for side, basis in (("input", K.V), ("output", K.U)):
        found = correspondence(h, basis, side)
        assert found.shape == (len(basis), 5)
        assert torch.allclose(found.sum(0), torch.ones(5, dtype=torch.float64), atol=1e-10)
    one = matricization(h, (5, 6))[2]
    assert float(correspondence(h, K.V)[1, 2]) == pytest.approx(float((one @ K.V[:, 1]).square().sum()))
    assert float(correspondence(h, K.U, "output")[1, 2]) == pytest.approx(float((one.mT @ K.U[:, 1]).square().sum()))
    assert float(rank_one_ness(h, (5, 6))[2]) == pytest.approx(float(torch.linalg.matrix_norm(one, 2)))


def test_kronecker_vectors_correspond_to_their_factors():
    K = decoupled(mlp(), batch(), "0")
    vectors = K.eigenpairs(6).vectors
    assert torch.allclose(rank_one_ness(vectors, K.matrix_shape), torch.ones(6, dtype=torch.float64))
    for column, (_, j, i) in enumerate(K.leading(6)):
        assert int(correspondence(vectors, K.V)[:, column].argmax()) == i
        assert int(correspondence(vectors, K.U, "output")[:, column].argmax()) == j


def test_bad_input():
    U = orthonormal(6, 2)
    for bad, words in (
        (lambda: overlap(U, orthonormal(5, 2)), "bases of one space"),
        (lambda: overlap(U, U, 3), "1 ≤ k ≤ 2"),
        (lambda: overlap(U, 2 * U), "not orthonormal"),
        (lambda: random_overlap(7, 6), "1 ≤ k ≤ d"),
        (lambda: matricization(U, (4, 2)), "4 × 2 weight"),
        (lambda: correspondence(U, torch.eye(4, dtype=torch.float64)), "square orthonormal basis"),
    ):
        with pytest.raises(InputError, match=words):
            bad()


def test_a_basis_that_is_not_orthonormal_is_refused():
    with pytest.raises(InputError, match="orthonormal"):
        correspondence(torch.ones(6) / 6**0.5, 2 * torch.eye(3))
