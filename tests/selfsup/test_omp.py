"""OMP against scikit-learn's, against least squares on its support, on hidden rows, at edges, and on bad input."""

import numpy as np
import pytest
import torch

from layerwise.foundations.errors import InputError
from layerwise.selfsup import SparseCode, masked_omp_loss, omp, reconstruction_loss, sample_sparse_data
from layerwise.selfsup.sparse_coding import omp as module
from layerwise.selfsup.sparse_coding.losses import represented

linear_model = pytest.importorskip("sklearn.linear_model")


def problem(d=100, p=200, n=300, q=None, sigma=0.1, seed=0):
    data = sample_sparse_data(d, p, 5, n, sigma, generator=seed)
    D = data.A if q is None else sample_sparse_data(d, q, 5, 1, 0.0, generator=seed + 1).A
    return data.Y, D


def theirs(Y, D, k):
    return torch.as_tensor(linear_model.orthogonal_mp(D.numpy(), Y.numpy().T, n_nonzero_coefs=k).reshape(-1, len(Y)).T)


def agrees(code: SparseCode, dense: torch.Tensor, tolerance: float = 1e-8) -> None:
    ours = code.dense(dense.shape[1])
    assert torch.equal(ours != 0, dense != 0)
    torch.testing.assert_close(ours, dense, rtol=0, atol=tolerance)


@pytest.mark.parametrize("q", [None, 60], ids=["float32 first", "float64"])
def test_the_same_as_scikit_learn(q):
    Y, D = problem(q=q)
    agrees(omp(Y, D, 5), theirs(Y, D, 5))


def test_the_same_as_scikit_learn_on_visible_rows():
    Y, D = problem()
    visible = torch.ones(100, dtype=torch.bool)
    visible[torch.randperm(100)[:10]] = False
    code = omp(Y, D, 5, visible=visible)
    agrees(code, theirs(Y[:, visible], D[visible], 5))
    assert not torch.equal(code.indices, omp(Y, D, 5).indices)
    changed, other = Y.clone(), D.clone()
    changed[:, ~visible], other[~visible] = 7.0, -3.0  # what is hidden does not matter
    again = omp(changed, other, 5, visible=visible)
    assert torch.equal(again.indices, code.indices)
    torch.testing.assert_close(again.values, code.values)


def test_atoms_of_any_norm_and_normalized_scores():
    Y, D = problem(n=80)
    longer = D * torch.linspace(0.5, 2, 200, dtype=D.dtype)
    agrees(omp(Y, longer, 5), theirs(Y, longer, 5))
    code, plain = omp(Y, longer, 5, normalize=True), omp(Y, D, 5)
    assert torch.equal(code.indices, plain.indices)
    scale = torch.linspace(0.5, 2, 200, dtype=D.dtype)[code.indices]
    torch.testing.assert_close(code.values * scale, plain.values)


def test_rounding_does_not_choose():
    """Atoms closer than float32 can tell are told apart, and the copies of others make no difference."""
    Y, D = problem(n=40)
    near = D.clone()
    near[:, 100:] = D[:, :100] + 1e-9 * torch.randn(100, 100, dtype=D.dtype)
    near /= near.norm(dim=0)
    scores = (Y @ near).abs()
    assert torch.equal(omp(Y, near, 1).indices[:, 0], scores.argmax(1))
    assert (scores.topk(2).values.diff().abs() < 1e-6).any()  # so some were told apart in float64


def test_values_are_least_squares_on_the_support():
    Y, D = problem(n=20)
    code = omp(Y, D, 4)
    for y, indices, values in zip(Y, *code, strict=True):
        found = torch.linalg.lstsq(D[:, indices], y[:, None]).solution[:, 0]
        torch.testing.assert_close(values, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scale_free(dtype):
    Y, D = (part.to(dtype) for part in problem(n=30))
    code, large = omp(Y, D, 5), omp(Y * 2.0**40, D * 2.0**-20, 5)
    assert torch.equal(code.indices, large.indices)
    torch.testing.assert_close(large.values, code.values * 2.0**60)


@pytest.mark.parametrize(("of_Y", "of_D"), [(1e20, 1), (1e-25, 1), (1, 1e25), (1, 1e-25)])
def test_sizes_whose_squares_are_no_numbers(of_Y, of_D):
    Y, D = torch.randn(5, 10), torch.randn(10, 20)
    code, other = omp(Y, D, 3), omp(Y * of_Y, D * of_D, 3)
    assert torch.equal(code.indices, other.indices)
    torch.testing.assert_close(other.values.double() * of_D / of_Y, code.values.double(), rtol=1e-4, atol=0)


def test_codes_are_constants_of_the_gradient():
    Y, D, seen = torch.randn(5, 8), torch.nn.Parameter(torch.randn(8, 9)), torch.arange(8) < 6
    for loss, visible in ((reconstruction_loss(Y, D, 2), None), (masked_omp_loss(Y, D, 2, seen), seen)):
        error = Y - represented(omp(Y, D.detach(), 2, visible=visible), D)
        by_hand = (error if visible is None else error[:, ~seen]).square().sum(1).mean()
        torch.testing.assert_close(*(torch.autograd.grad(one, D)[0] for one in (loss, by_hand)))
    assert not omp(Y.requires_grad_(), D, 2).values.requires_grad


def test_several_dictionaries_at_once_and_rows_in_parts(monkeypatch):
    (Y0, D0), (Y1, D1) = problem(n=30), problem(n=30, seed=5)
    both = omp(torch.stack([Y0, Y1]), torch.stack([D0, D1]), 5)
    monkeypatch.setattr(module, "SCORES", {"cpu": 7 * 200})
    for r, (Y, D) in enumerate(((Y0, D0), (Y1, D1))):
        alone = omp(Y, D, 5)
        assert torch.equal(both.indices[r], alone.indices)
        torch.testing.assert_close(both.values[r], alone.values)


def test_a_sample_that_fewer_atoms_represent():
    _, D = problem(q=60)
    Y = torch.stack([3 * D[:, 4] - D[:, 9], torch.zeros_like(D[:, 0]), D[:, 7]])
    code = omp(Y, D, 4)
    dense = code.dense(60)
    torch.testing.assert_close(dense @ D.mT, Y)
    assert dense.count_nonzero(1).tolist() == [2, 0, 1]
    assert all(len(set(row)) == 4 for row in code.indices.tolist())


def test_dependent_atoms_are_not_divided_by_zero():
    D = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    code = omp(torch.tensor([[2.0, 1.0, 5.0]], dtype=torch.float64), D, 3)
    assert torch.isfinite(code.values).all()
    torch.testing.assert_close(code.dense(3) @ D.mT, torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    Y, D = problem()
    code = omp(Y.cuda(), D.cuda(), 5)
    agrees(SparseCode(*(part.cpu() for part in code)), theirs(Y, D, 5))


def bad(**changed):
    given = {"Y": torch.randn(4, 6), "D": torch.randn(6, 9), "k": 2} | changed
    return given.pop("Y"), given.pop("D"), given.pop("k"), given


NAN = torch.full((4, 6), float("nan"))
ZERO = torch.cat([torch.randn(6, 3), torch.zeros(6, 1)], 1)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"k": 7}, "1 ≤ k ≤ 6"),
        ({"k": 0}, "1 ≤ k ≤ 6"),
        ({"k": 5, "visible": torch.arange(6) < 4}, "4 visible rows"),
        ({"D": ZERO}, "column 3 is zero"),
        ({"D": torch.eye(6), "visible": torch.arange(6) < 5}, "column 5 is zero in all visible rows"),
        ({"visible": torch.zeros(6, dtype=torch.bool)}, "no visible row"),
        ({"visible": torch.ones(5, dtype=torch.bool)}, "one truth value a coordinate"),
        ({"Y": NAN}, "samples with NaN"),
        ({"D": torch.full((6, 9), float("inf"))}, "dictionary with NaN or infinite"),
        ({"D": torch.randn(9, 6)}, "Transpose"),
        ({"D": torch.randn(6, 9).double()}, "one floating-point type"),
        ({"Y": torch.randn(4, 6).half(), "D": torch.randn(6, 9).half()}, "float32 or float64"),
        ({"Y": torch.randn(6)}, "one sample"),
        ({"Y": torch.randn(0, 6)}, "one or more"),
        ({"Y": np.ones((4, 6))}, "tensors"),
        ({"k": 2.0}, "a whole number"),
        ({"k": True}, "a whole number"),
        ({"visible": torch.ones(1, 6, dtype=torch.bool)}, "one truth value a coordinate"),
        ({"visible": torch.ones(6, dtype=torch.long)}, "torch.bool"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("error")
def test_bad_input(changed, says, monkeypatch):
    Y, D, k, options = bad(**changed)
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(InputError, match=says):
        omp(Y, D, k, **options)


def test_agreement_is_with_their_fast_path_too():
    Y, D = problem(n=30)
    gram = linear_model.orthogonal_mp_gram(D.mT.numpy() @ D.numpy(), D.mT.numpy() @ Y.numpy().T, n_nonzero_coefs=5)
    agrees(omp(Y, D, 5), torch.as_tensor(np.ascontiguousarray(gram.T)))
