"""What theory promises: where approximations are exact, which is the better, what the Fisher matrix measures."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from references import block_order, close, layer_orders, name_of
from torch import Tensor, nn

import layerwise as lw
from layerwise.testing import oracles
from layerwise.testing.cases import Case, case, select


def _blocks(F_: Any, M: Tensor) -> dict[str, Tensor]:
    """Each layer's block of a dense matrix."""
    return {name: M[order.unsqueeze(1), order] for name, order in layer_orders(F_).items()}


# --- where K-FAC is exact ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "mlp_no_bias", "relu", "two_inputs", "regression", "multi_label"])
@pytest.mark.parametrize("structure", ["kfac", "ekfac"])
@pytest.mark.usefixtures("untyped")
def test_kfac_of_one_example_and_one_cotangent_is_exact(name: str, structure: str):
    """N = 1 and one position: the mean of products is the product of means."""
    c = case(name)
    model, x, y = c.make()
    x = tuple(t[:1] for t in x) if isinstance(x, tuple) else x[:1]
    K: Any = lw.fisher(model, (x, y[:1]), c.likelihood, structure, "empirical")
    expected = _blocks(K, oracles.empirical_fisher(model, x, y[:1], **c.oracle_options))
    for layer, block in _blocks(K, K.to_dense()).items():
        close(block, expected[layer])


@pytest.mark.parametrize("name", ["deep_linear", "deep_linear_bias"])
def test_kfac_of_a_deep_linear_net_with_squared_loss_is_exact(name: str):
    """Gradients do not depend on inputs there, so that nothing correlates."""
    c = case(name)
    model, x, y = c.make()
    expected = oracles.fisher(model, x, y, **c.oracle_options)
    for structure in ("kfac", "ekfac"):
        K: Any = lw.fisher(model, (x, y), c.likelihood, structure, "exact")
        for layer, block in _blocks(K, K.to_dense()).items():
            close(block, _blocks(K, expected)[layer])
        # Thm 3: in the true eigenbasis, the scalings are the true spectrum.
        close(K.eigenvalues(), torch.cat([torch.linalg.eigvalsh(b) for b in _blocks(K, expected).values()]).sort()[0])


# --- EKFAC ------------------------------------------------------------------------------------------------


@st.composite
def _layers(draw: st.DrawFn) -> tuple[nn.Module, Tensor, Tensor]:
    """One random layer of interest, random data, a random head."""
    torch.manual_seed(draw(st.integers(0, 2**20)))
    n, i, o = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    bias, kind = draw(st.booleans()), draw(st.sampled_from(["linear", "sequence", "conv", "grouped"]))
    if kind in ("linear", "sequence"):
        shape = (n, i) if kind == "linear" else (n, draw(st.integers(1, 4)), i)
        layer: nn.Module = nn.Linear(i, o, bias=bias)
    else:
        groups = 2 if kind == "grouped" else 1
        layer = nn.Conv1d(groups * i, groups * o, draw(st.integers(1, 3)), groups=groups, bias=bias)
        shape = (n, groups * i, draw(st.integers(3, 5)))
    x = torch.randn(*shape).double() * draw(st.sampled_from([0.1, 1.0, 10.0]))
    width = layer.double()(x).flatten(1).shape[1]
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(width, 3)).double()
    return model, x, torch.randint(3, (n,))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(_layers(), st.sampled_from(["exact", "empirical"]), st.sampled_from(["expand", "reduce"]))
def test_the_error_of_ekfac_is_not_above_that_of_kfac_contract(made, estimator: str, sharing: str):
    """Thm 2, Lemma 1 and the trace, for every layer of a random model."""
    model, x, y = made
    options: Any = {"estimator": estimator, "sharing": sharing}
    K: Any = lw.fisher(model, (x, y), structure="kfac", **options)
    E: Any = lw.fisher(model, (x, y), structure="ekfac", **options)
    oracle = oracles.fisher if estimator == "exact" else oracles.empirical_fisher
    exact = _blocks(K, oracle(model, x, y))
    kfac, ekfac = _blocks(K, K.to_dense()), _blocks(E, E.to_dense())
    for layer, block in exact.items():
        size = float(block.norm())
        assert (block - ekfac[layer]).norm() <= (block - kfac[layer]).norm() + 1e-9 * size
        close(ekfac[layer].trace(), block.trace(), 1e-8, scale=1e-12)
        operator = E.operators[layer]
        best = (block - operator.as_matrix()).norm()
        for seed in range(3):
            noise = torch.randn(operator.scalings.shape, generator=torch.Generator().manual_seed(seed)).double()
            moved = copy.copy(operator)
            object.__setattr__(moved, "scalings", operator.scalings + 0.1 * operator.scalings.mean() * noise)
            assert (block - moved.as_matrix()).norm() >= best - 1e-9 * size


@pytest.mark.parametrize("name", ["mlp", "conv2d", "transformer", "embedding"])
@pytest.mark.usefixtures("untyped")
def test_each_structure_is_the_nearer_the_more_it_keeps_contract(name: str):
    c = case(name)
    model, x, y = c.make()
    expected = oracles.fisher(model, x, y, **c.oracle_options)

    def error(structure: str) -> float:
        return float((lw.fisher(model, (x, y), structure=structure, estimator="exact").to_dense() - expected).norm())

    assert error("block") <= error("ekfac") <= error("kfac")
    assert error("block") <= error("quasidiag") <= error("diag")


# --- one matrix by two definitions ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "regression", "multi_label", "class_weights", "sequence_linear"])
def test_the_ggn_is_the_exact_fisher(name: str):
    """J ᵀ (∂²ℓ/∂f²) J with the loss's own second derivative."""
    c = case(name)
    model, x, y = c.make()
    J = oracles.jacobian(model, x).flatten(0, -2)
    f = oracles.outputs(model, x)
    H = torch.autograd.functional.hessian(lambda f: c.loss(f, y), f).reshape(f.numel(), f.numel())
    options = {k: v for k, v in c.options.items() if v is not None}
    for structure in ("dense", "lowrank"):
        G = lw.ggn(model, (x, y), c.likelihood, structure, **options)
        close(G.to_dense(), J.mT @ H @ J)
        close(G.to_dense(), lw.fisher(model, (x, y), c.likelihood, structure, "exact", **options).to_dense())


@pytest.mark.parametrize("c", select("piecewise_linear"), ids=name_of)
@pytest.mark.usefixtures("untyped")
def test_layer_hessians_of_piecewise_linear_nets_are_exact_ggn_blocks(c: Case):
    """The output is linear in the parameters of any one layer, away from kinks."""
    model, x, y = c.make()
    H = lw.hessian(model, (x, y), loss=c.loss, structure="block")
    G = lw.ggn(model, (x, y), c.likelihood, "block")
    close(H.to_dense(), G.to_dense())


@pytest.mark.parametrize("name", ["mlp", "regression", "multi_label"])
def test_the_fisher_is_the_second_order_of_the_divergence_exact(name: str):
    """2 KL(p_θ ‖ p_{θ+tv}) / t² → vᵀFv."""
    c, t = case(name), 1e-3
    model, x, y = c.make()
    v = lw.ParamVector.randn(model, generator=3)
    expected = lw.fisher(model, (x, y), c.likelihood, "implicit", "exact").quad(v)
    moved = copy.deepcopy(model)
    v.add_to(moved, t)
    with torch.no_grad():
        f, g = model(x), moved(x)
        if c.likelihood == "categorical":
            kl = (f.softmax(-1) * (f.log_softmax(-1) - g.log_softmax(-1))).sum()
        elif c.likelihood == "gaussian":
            kl = 0.5 * (f - g).square().sum()
        else:
            q = f.sigmoid()
            kl = (q * (F.logsigmoid(f) - F.logsigmoid(g)) + (1 - q) * (F.logsigmoid(-f) - F.logsigmoid(-g))).sum()
    close(2 * kl / len(f) / t**2, expected, 1e-2)


# --- random labels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "multi_label", "regression"])
@pytest.mark.usefixtures("untyped")
def test_the_sampled_fisher_converges_to_the_exact_one_contract(name: str):
    """As 1/√samples: the slope of log error against log samples is −½."""
    c = case(name)
    model, x, y = c.make()
    exact = oracles.fisher(model, x, y, **c.oracle_options)
    samples = [4, 16, 64, 256]
    errors = []
    for count in samples:
        squares = [
            (lw.fisher(model, (x, y), c.likelihood, "dense", "sampled", count, seed=seed).to_dense() - exact).norm()
            ** 2
            for seed in range(12)
        ]
        errors.append(torch.stack(squares).mean().sqrt())
    logs = torch.tensor(samples).double().log()
    values = torch.stack(errors).log()
    slope = ((logs - logs.mean()) * (values - values.mean())).sum() / (logs - logs.mean()).square().sum()
    assert -0.6 <= slope <= -0.4


def test_a_seed_fixes_the_labels_that_are_drawn_contract():
    model, x, y = case("mlp").make()
    first, again, other = (
        lw.fisher(model, (x, y), structure="dense", samples=2, seed=seed).to_dense() for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    by_generator = [
        lw.fisher(model, (x, y), structure="dense", seed=torch.Generator().manual_seed(0)).to_dense() for _ in range(2)
    ]
    assert torch.equal(*by_generator)


def test_an_implicit_sampled_fisher_stays_one_matrix_contract():
    model, x, y = case("mlp").make()
    implicit = lw.fisher(model, (x, y), structure="implicit", samples=2, seed=4)
    dense = lw.fisher(model, (x, y), structure="dense", samples=2, seed=4)
    v = lw.ParamVector.randn(model, generator=0)
    for _ in range(2):
        close((implicit @ v).flat(), dense.to_dense() @ v.flat())


def test_blocks_are_in_row_major_order_exact():
    """(G ⊗ A) vec W = vec(G W A): the reference of every comparison above, written out once."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2, bias=False).double(), torch.randn(4, 3).double()
    K: Any = lw.fisher(model, (x, torch.randn(4, 2).double()), "gaussian", "kfac", "exact")
    A, W = x.mT @ x / 4, torch.randn(2, 3).double()
    close((K @ {"weight": W})["weight"], W @ A)  # G = I
    assert torch.equal(block_order(K.shapes, K.table.layers[0]), torch.arange(6))
