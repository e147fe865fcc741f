"""The oracles against closed forms, PyTorch's own losses, finite differences and one another."""

import ast
import copy
import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.testing import oracles
from layerwise.testing.cases import CASES, Case, case, select

WEIGHT = torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)


def _name(c: Case) -> str:
    return c.name


OPTIONS = {"weights", "smoothing", "mask", "layout", "gaussian", "bernoulli"}


def in_turn(first: int) -> list:
    """All cases; `make test` has every second one, and all with an option of the likelihood: oracles see no layers."""
    kept = {*(c.name for c in CASES[first::2]), *(c.name for c in CASES if c.tags & OPTIONS)}
    return [pytest.param(c, marks=() if c.name in kept else pytest.mark.slow) for c in CASES]


def _call(model: nn.Module, x) -> Tensor:
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def _flat_grad(loss: Tensor, model: nn.Module) -> Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
    return torch.cat([g.reshape(-1) for g in grads])


def _softmax_regression(bias: bool = False) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(4, 3, bias=bias).double(), torch.randn(5, 4).double(), torch.tensor([0, 2, 1, 1, 0])


# --- parameters, outputs, Jacobian ------------------------------------------------------------------------


def test_flat_order_is_that_of_named_parameters_with_gradients():
    model, _, _ = case("frozen_bias").make()
    slices = oracles.parameter_slices(model)
    assert list(slices) == ["0.weight", "2.weight", "2.bias", "4.weight", "4.bias"]
    theta = oracles.flat_parameters(model)
    assert theta.shape[0] == 68
    assert torch.equal(theta[slices["2.weight"]].reshape(5, 5), model.get_parameter("2.weight"))


def test_a_tied_parameter_is_listed_once():
    model, _, _ = case("language_model_tied").make()
    assert list(oracles.parameter_slices(model)) == ["0.weight", "1.weight", "1.bias"]


@pytest.mark.parametrize("c", CASES, ids=_name)
def test_jacobian_is_autograds(c: Case):
    model, x, _ = c.make(seed=1)
    f = _call(model, x)
    J = oracles.jacobian(model, x)
    v = torch.randn(3, *f.shape, dtype=f.dtype, generator=torch.Generator().manual_seed(0))
    assert J.shape == (*f.shape, oracles.flat_parameters(model).numel())
    torch.testing.assert_close(oracles.outputs(model, x), f.detach(), rtol=1e-12, atol=1e-12)
    for v_k in v:
        expected = _flat_grad((f * v_k).sum(), model)
        torch.testing.assert_close(v_k.flatten() @ J.flatten(0, -2), expected, rtol=1e-10, atol=1e-12)


def test_float32_models_are_raised_to_float64_and_left_alone():
    model, x, y = case("transformer").make()
    model.float()
    before = copy.deepcopy(model.state_dict())
    fast = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():  # the caller's mode does not matter either
        assert oracles.loss_hessian(model, x.float(), y).dtype == torch.float64
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    assert not any(m._forward_hooks or m.training for m in model.modules())
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_ntk_has_the_spectrum_of_the_squared_loss_fisher():
    model, x, _ = case("regression").make()
    kernel = torch.linalg.eigvalsh(oracles.ntk(model, x))
    fisher = torch.linalg.eigvalsh(oracles.fisher(model, x, likelihood="gaussian"))
    torch.testing.assert_close(kernel, 4 * fisher[-12:])


def test_ntk_between_two_batches_is_example_major():
    model, x, _ = case("regression").make()
    cross = oracles.ntk(model, x, x[1:3])
    torch.testing.assert_close(cross, oracles.ntk(model, x)[:, 3:9])


# --- the Fisher matrix ------------------------------------------------------------------------------------


def test_fisher_of_softmax_regression_by_hand():
    model, x, y = _softmax_regression(bias=True)
    expected = torch.zeros(15, 15, dtype=torch.float64)
    for x_n, y_n in zip(x, y, strict=True):
        p = (model.weight @ x_n + model.bias).softmax(0).detach()
        H = WEIGHT[y_n] * (torch.diag(p) - torch.outer(p, p))
        expected[:12, :12] += torch.kron(H, torch.outer(x_n, x_n)) / 5
        expected[:12, 12:] += torch.kron(H, x_n[:, None]) / 5
        expected[12:, 12:] += H / 5
    expected[12:, :12] = expected[:12, 12:].T
    torch.testing.assert_close(oracles.fisher(model, x, y, weight=WEIGHT), expected)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian", "bernoulli"])
def test_of_a_linear_model_the_hessian_is_the_fisher(likelihood: str):
    model, x, labels = _softmax_regression(bias=True)
    y = labels if likelihood == "categorical" else F.one_hot(labels, 3).double()
    H = oracles.loss_hessian(model, x, y, likelihood=likelihood)
    torch.testing.assert_close(oracles.fisher(model, x, likelihood=likelihood), H)


@pytest.mark.parametrize("c", select("piecewise_linear"), ids=_name)
def test_of_a_piecewise_linear_model_hessian_blocks_are_fisher_blocks(c: Case):
    model, x, y = c.make()
    H = oracles.loss_hessian(model, x, y, **c.oracle_options)
    G = oracles.fisher(model, x, y, **c.oracle_options)
    for where in oracles.parameter_slices(model).values():
        torch.testing.assert_close(G[where, where], H[where, where], rtol=1e-9, atol=1e-12)


def test_fisher_is_the_expected_square_of_the_score_categorical():
    model, x, y = case("class_weights").make()
    expected = torch.zeros(43, 43, dtype=torch.float64)
    p = oracles.outputs(model, x).softmax(-1)
    for label in range(3):
        g = oracles.gradients(model, x, torch.full((4,), label))
        expected += torch.einsum("n,ni,nj->ij", WEIGHT[y] * p[:, label], g, g) / 4
    torch.testing.assert_close(oracles.fisher(model, x, y, weight=WEIGHT), expected)


def test_fisher_is_the_expected_square_of_the_score_bernoulli():
    model, x, _ = case("multi_label").make()
    expected = torch.zeros(43, 43, dtype=torch.float64)
    q = oracles.outputs(model, x).sigmoid()
    for bits in itertools.product([0.0, 1.0], repeat=3):
        y = torch.tensor(bits, dtype=torch.float64).expand(4, 3)
        g = oracles.gradients(model, x, y, likelihood="bernoulli")
        probability = torch.where(y == 1, q, 1 - q).prod(-1)
        expected += torch.einsum("n,ni,nj->ij", probability, g, g) / 4
    torch.testing.assert_close(oracles.fisher(model, x, likelihood="bernoulli"), expected)


@pytest.mark.parametrize("c", CASES, ids=_name)
def test_fisher_is_finite_symmetric_and_positive(c: Case):
    model, x, y = c.make()
    G = oracles.fisher(model, x, y, **c.oracle_options)
    assert G.isfinite().all()
    torch.testing.assert_close(G, G.T, rtol=1e-12, atol=1e-14)
    eigenvalues = torch.linalg.eigvalsh(G)
    assert eigenvalues[0] >= -1e-12 * eigenvalues[-1]
    assert eigenvalues[-1] > 0


@pytest.mark.parametrize("name", ["mlp", "multi_label", "lstm", "attention"])
def test_fisher_is_the_second_order_of_the_kl_divergence(name: str):
    c = case(name)
    model, x, y = c.make()
    G = oracles.fisher(model, x, y, **c.oracle_options)
    v = torch.randn(len(G), dtype=G.dtype, generator=torch.Generator().manual_seed(0))
    t = 1e-4
    moved = copy.deepcopy(model)
    nn.utils.vector_to_parameters(oracles.flat_parameters(model) + t * v, moved.parameters())
    z, z_moved = oracles.outputs(model, x), oracles.outputs(moved, x)
    if c.likelihood == "bernoulli":  # as two classes
        z, z_moved = (torch.stack([F.logsigmoid(z_), F.logsigmoid(-z_)], -1) for z_ in (z, z_moved))
    kl = F.kl_div(z_moved.log_softmax(-1), z.log_softmax(-1), reduction="sum", log_target=True) / len(y)
    torch.testing.assert_close(2 * kl / t**2, v @ G @ v, rtol=1e-2, atol=0)


def test_label_smoothing_does_not_change_the_fisher():
    c = case("label_smoothing")
    model, x, y = c.make()
    assert torch.equal(oracles.fisher(model, x, y, **c.oracle_options), oracles.fisher(model, x, y))


def test_layouts_of_one_function_have_one_fisher():
    reference = oracles.fisher(*case("sequence_linear").make())
    for name in (
        "sequence_conv",
        "merged_inside",
        "merged_time_major",
        "time_first_inside",
        "flattened_outputs",
    ):
        c = case(name)
        model, x, y = c.make()
        torch.testing.assert_close(oracles.fisher(model, x, y, **c.oracle_options), reference)


def test_masked_positions_are_as_if_they_were_not_there():
    model, x, y = case("regression_masked").make()
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[:, 3:] = False
    options = {"likelihood": "gaussian"}
    for oracle in (oracles.fisher, oracles.empirical_fisher, oracles.loss_hessian):
        torch.testing.assert_close(
            oracle(model, x, y, mask=mask, **options), oracle(model, x[:, :3], y[:, :3], **options)
        )


def test_a_mask_of_categorical_positions_is_an_ignored_label():
    c = case("ignore_index")
    model, x, y = c.make()
    mask = y != -100
    y_any = y.masked_fill(~mask, 2)
    for oracle in (oracles.fisher, oracles.empirical_fisher):
        expected = oracle(model, x, y, normalize="terms", ignore_index=-100)
        torch.testing.assert_close(oracle(model, x, y_any, normalize="terms", mask=mask), expected)


def test_a_mask_of_single_entries_drops_their_rows_of_the_jacobian():
    model, x, y = case("regression").make()
    mask = torch.tensor([[1, 0, 1], [1, 1, 1], [0, 0, 0], [0, 1, 1]]) == 1
    J = oracles.jacobian(model, x)[mask]
    F_masked = oracles.fisher(model, x, y, likelihood="gaussian", mask=mask)
    torch.testing.assert_close(F_masked, J.T @ J / 4)
    F_terms = oracles.fisher(model, x, y, likelihood="gaussian", mask=mask, normalize="terms")
    torch.testing.assert_close(F_terms, J.T @ J / 7)


def test_terms_are_the_weights_that_count():
    c = case("ignore_class")
    model, x, y = c.make()
    terms = WEIGHT[y[y != 1]].sum().item()
    for oracle in (oracles.fisher, oracles.empirical_fisher, oracles.loss_hessian):
        a_mean = oracle(model, x, y, **c.oracle_options)
        torch.testing.assert_close(oracle(model, x, y, normalize="terms", **c.oracle_options), a_mean * 3 / terms)


def test_the_mean_over_terms_is_pytorchs_mean():
    c = case("ignore_class")
    model, x, y = c.make()

    def mean(f: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(f.mT, y, weight=WEIGHT, ignore_index=1)

    H = oracles.loss_hessian(model, x, y, normalize="terms", **c.oracle_options)
    torch.testing.assert_close(H, oracles.hessian(model, x, y, mean))


# --- gradients, moments, Hessians -------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("ignore_index", [None, -100, 2])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
def test_categorical_gradients_are_those_of_cross_entropy(weight, ignore_index, smoothing):
    model, x, y = case("sequence_linear").make()
    if ignore_index is not None:
        y[0, 1] = y[2, 4] = ignore_index
    options = {"weight": weight, "label_smoothing": smoothing}
    ignored = -100 if ignore_index is None else ignore_index
    losses = F.cross_entropy(model(x).mT, y, reduction="none", ignore_index=ignored, **options).sum(1)
    g = oracles.gradients(model, x, y, ignore_index=ignore_index, **options)
    assert g.shape == (3, 43)
    for g_n, loss in zip(g, losses, strict=True):
        torch.testing.assert_close(g_n, _flat_grad(loss, model), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("c", CASES, ids=_name)
def test_the_mean_gradient_is_that_of_the_mean_loss(c: Case):
    model, x, y = c.make()
    g = oracles.gradients(model, x, y, **c.oracle_options)
    expected = _flat_grad(c.loss(_call(model, x), y), model)
    torch.testing.assert_close(g.mean(0), expected, rtol=1e-10, atol=1e-13)
    assert expected.norm() > 0


@pytest.mark.parametrize("c", [c for c in CASES if "mask" not in c.options], ids=_name)
def test_each_gradient_is_that_of_its_example(c: Case):
    model, x, y = c.make()
    f, rows = _call(model, x), c.rows
    losses = [c.loss(f_n, y_n) for f_n, y_n in zip(f.split(rows), y.split(rows), strict=True)]
    g = oracles.gradients(model, x, y, **c.oracle_options)
    for g_n, loss in zip(g, losses, strict=True):
        torch.testing.assert_close(g_n, _flat_grad(loss, model), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("c", in_turn(1), ids=_name)
def test_both_hessians_agree(c: Case):
    model, x, y = c.make()
    H = oracles.loss_hessian(model, x, y, **c.oracle_options)
    torch.testing.assert_close(H, oracles.hessian(model, x, y, c.loss), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(H, H.T, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("c", in_turn(0), ids=_name)
def test_hessian_is_the_difference_of_gradients(c: Case):
    model, x, y = c.make()
    H = oracles.hessian(model, x, y, c.loss)
    v = torch.randn(len(H), dtype=H.dtype, generator=torch.Generator().manual_seed(0))
    # The row of an embedding's padding is a constant to autograd, though the output depends on it.
    v *= oracles.gradients(model, x, y, **c.oracle_options).ne(0).any(0)
    t, gradients = 1e-5, []
    for sign in (1, -1):
        moved = copy.deepcopy(model)
        trainable = [p for p in moved.parameters() if p.requires_grad]
        nn.utils.vector_to_parameters(oracles.flat_parameters(model) + sign * t * v, trainable)
        gradients.append(_flat_grad(c.loss(_call(moved, x), y), moved))
    torch.testing.assert_close(H @ v, (gradients[0] - gradients[1]) / (2 * t), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["mlp", "ignore_index", "flattened_outputs", "multi_label", "weights_smoothing"])
def test_the_uncentered_moment_is_the_empirical_fisher(name: str):
    c = case(name)
    model, x, y = c.make()
    moment = oracles.gradient_moment(model, x, y, c.loss, examples=c.options.get("examples"))
    torch.testing.assert_close(moment, oracles.empirical_fisher(model, x, y, **c.oracle_options))


def test_the_centered_moment_is_a_covariance():
    model, x, y = case("mlp").make()
    g = oracles.gradients(model, x, y)
    centered = oracles.gradient_moment(model, x, y, F.cross_entropy, centered=True)
    torch.testing.assert_close(centered, torch.cov(g.T, correction=0))


# --- cotangents and factors -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "conv2d", "transformer", "flattened_outputs"])
def test_fisher_from_the_roots_of_the_output_fisher(name: str):
    """Σ_y p_y (e_y − p)(e_y − p)ᵀ = diag(p) − ppᵀ, one position at a time so that positions do not mix."""
    c = case(name)
    model, x, _ = c.make()
    p = oracles.outputs(model, x).softmax(-1)
    roots = p.sqrt().unsqueeze(-1) * (torch.eye(3, dtype=p.dtype) - p.unsqueeze(-2))  # [*out, y, C]
    examples = c.options.get("examples", len(p))
    roots = roots.reshape(examples, -1, 3, 3)
    S = roots.shape[1]
    vectors = torch.einsum("nsyc,st->syntc", roots, torch.eye(S, dtype=p.dtype))
    F_roots = oracles.fisher_from_labels(model, x, vectors.reshape(S * 3, *p.shape), examples=examples)
    torch.testing.assert_close(F_roots, oracles.fisher(model, x, **c.oracle_options))


def test_kronecker_factors_are_the_moments():
    torch.manual_seed(0)
    a, g = torch.randn(3, 5, 4).double(), torch.randn(2, 3, 5, 6).double()
    A, G = oracles.kronecker_factors(a, g)
    torch.testing.assert_close(A, torch.einsum("nsi,nsj->ij", a, a) / 15)
    torch.testing.assert_close(G, torch.einsum("vnso,vnsp->op", g, g) / 3)
    ragged = oracles.kronecker_factors([a[0], a[1, :2]], [[g[0, 0], g[0, 1, :2]]])
    torch.testing.assert_close(ragged[0], torch.einsum("si,sj->ij", *2 * [torch.cat([a[0], a[1, :2]])]) / 7)


def test_kronecker_factors_of_one_example_give_its_block():
    model, x, _ = _softmax_regression()
    p = model(x[:1]).softmax(-1).detach()[0]
    roots = p.sqrt()[:, None] * (torch.eye(3) - p)
    A, G = oracles.kronecker_factors(x[:1, None], roots[:, None, None])
    torch.testing.assert_close(torch.kron(G, A), oracles.fisher(model, x[:1]))


# --- the boundary -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"likelihood": "poisson"}, "none of categorical"),
        ({"normalize": "tokens"}, "neither"),
        ({"weight": WEIGHT}, "pass y"),
        ({"ignore_index": 0}, "pass y"),
        ({"likelihood": "gaussian", "label_smoothing": 0.1}, "mean nothing to gaussian"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message: str):
    model, x, _ = _softmax_regression()
    with pytest.raises(ValueError, match=message):
        oracles.fisher(model, x, **options)


def test_oracles_import_nothing_of_the_library():
    tree = ast.parse(inspect.getsource(oracles))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or alias.name for node in imports for alias in node.names}
    assert not any(name.startswith("layerwise") for name in names)
    assert not any(getattr(node, "level", 0) for node in imports)
