"""Every case × estimator × structure × normalization equals a dense matrix computed by autodiff alone."""

from typing import Any

import pytest
import torch
from coverage_table import EVERY_LIKELIHOOD, STRUCTURES, has_loss, others
from references import (
    SAMPLES,
    SEED,
    block_order,
    counts,
    data_of,
    law_of,
    name_of,
    oracle_of,
    relative,
    with_likelihood,
)
from torch import Tensor, nn

import layerwise as lw
from layerwise.testing import oracles
from layerwise.testing.cases import CASES, Case, case

TOLERANCE = 1e-9
PLAIN = tuple(s for s in STRUCTURES if s not in ("kfac", "ekfac"))
PATHS = ("dense", "diag", "implicit")
"""One structure for each way a structure can go over the data: all layers at once, one by one, products."""

TYPED = ("mlp", "conv2d", "conv_transpose2d", "layer_norm", "embedding", "attention", "lstm", "multi_label_masked")
"""Cases on which annotations are checked too: one for each kind of rule."""
EVERY_STRUCTURE = ("ignore_class", "class_weights", "conv2d_grouped", "flattened_outputs", "multi_label_masked", "lstm")
"""Cases that are run in all structures also where the paths of `PATHS` are enough for the others."""


def in_turn(first: int, every: int) -> list[Any]:
    """All cases, of which `make test` has every so many: what cases and estimators share is not run with each pair."""
    kept = {*(c.name for c in CASES[first::every]), *EVERY_STRUCTURE}
    return [pytest.param(c, marks=() if c.name in kept else pytest.mark.slow) for c in CASES]


def _build(c: Case, model: nn.Module, x: Any, y: Tensor, **options: Any) -> Any:
    return lw.fisher(model, data_of(c, x, y), law_of(c), samples=SAMPLES, seed=SEED, **options)


def _errors(F: Any, expected: Tensor) -> dict[str, float]:
    """Relative errors of everything the structure promises."""
    if F.structure == "implicit":
        v = torch.randn(len(expected), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        return {"product": relative(F @ v, expected @ v), "trace": relative(F.trace(), expected.trace())}
    found = F.to_dense()
    if F.structure in ("dense", "lowrank"):
        return {"matrix": relative(found, expected)}
    errors = {
        "trace": relative(F.trace(), expected.trace()),
        "diagonal": relative(F.diagonal().flat(), expected.diagonal()),
    }
    pattern = _pattern(F)
    errors["entries"] = relative(found[pattern], expected[pattern])
    errors["elsewhere"] = float(found[~pattern].abs().sum())
    return errors


def _pattern(F: Any) -> Tensor:
    """Where a structure may have entries."""
    pattern = torch.eye(F.numel(), dtype=torch.bool)
    for spec in F.table.layers:
        order = block_order(F.shapes, spec)
        if F.structure == "block":
            pattern[order.unsqueeze(1), order] = True
        elif F.structure == "quasidiag" and len(spec.form.parts) == 2:
            units = order.view(-1, spec.form.inputs)
            pattern[units, units[:, -1:]] = True
            pattern[units[:, -1:], units] = True
    return pattern


def _check(c: Case, estimator: str, structures: tuple[str, ...], normalize: str = "examples") -> None:
    model, x, y = c.make()
    expected = oracle_of(c, model, x, y, estimator)
    if normalize == "terms":
        n, terms = counts(c, model, x, y)
        expected = expected * n / terms
    wrong = {}
    for structure in structures:
        F = _build(c, model, x, y, structure=structure, estimator=estimator, normalize=normalize)
        bad = {k: f"{e:.1e}" for k, e in _errors(F, expected).items() if not e <= TOLERANCE}
        wrong |= {structure: bad} if bad else {}
    assert not wrong


@pytest.mark.parametrize("c", CASES, ids=name_of)
def test_the_exact_fisher_equals_the_oracle(c: Case, covered: set, request: pytest.FixtureRequest):
    if c.name not in TYPED:
        request.getfixturevalue("untyped")
    _check(c, "exact", PLAIN)
    covered |= {(c.name, c.likelihood, structure) for structure in PLAIN}


@pytest.mark.parametrize("c", in_turn(0, 2), ids=name_of)
@pytest.mark.usefixtures("untyped")
def test_the_empirical_fisher_equals_the_oracle(c: Case):
    _check(c, "empirical", PLAIN)


@pytest.mark.parametrize("c", in_turn(1, 2), ids=name_of)
@pytest.mark.usefixtures("untyped")
def test_the_sampled_fisher_equals_the_oracle_at_the_labels_drawn(c: Case):
    _check(c, "sampled", PLAIN)


MANY_TERMS = (
    *("segmentation", "sequence_linear", "sequence_conv", "merged_inside", "merged_time_major", "time_first_inside"),
    *("flattened_outputs", "layer_norm", "layer_norm_two_axes", "rms_norm", "language_model", "language_model_tied"),
    *("attention", "attention_time_first", "attention_causal", "attention_no_bias", "attention_bias_kv"),
    *("attention_padded", "attention_cross", "transformer", "transformer_time_first", "lstm", "bare_parameters"),
    *("sliced_positions", "class_weights", "weights_smoothing", "ignore_index", "ignore_class", "regression_masked"),
    *("regression_entries_masked", "multi_label_masked"),
)
"""Cases whose terms are not as many as their examples."""


@pytest.mark.usefixtures("untyped")
def test_cases_of_many_terms_are_known():
    found = {c.name: counts(c, *c.make()) for c in CASES}
    assert tuple(name for name, (n, terms) in found.items() if n != terms) == MANY_TERMS


@pytest.mark.parametrize("c", [c for c in CASES if c.name in MANY_TERMS], ids=name_of)
@pytest.mark.usefixtures("untyped")
def test_the_mean_over_terms_equals_the_oracle(c: Case):
    _check(c, "exact", PATHS, "terms")
    if c.name in EVERY_STRUCTURE:
        for estimator in ("empirical", "sampled"):
            _check(c, estimator, PLAIN, "terms")


@pytest.mark.parametrize("name", EVERY_LIKELIHOOD)
@pytest.mark.usefixtures("untyped")
def test_other_likelihoods_equal_the_oracle(name: str, covered: set):
    for likelihood in others(case(name)):
        c = with_likelihood(case(name), likelihood)
        _check(c, "exact", PLAIN)
        covered |= {(c.name, c.likelihood, structure) for structure in PLAIN}


def _check_kronecker(c: Case, covered: set) -> None:
    """The trace of EKFAC is exact and its error not above K-FAC's; layers without a product keep exact blocks."""
    model, x, y = c.make()
    expected = oracle_of(c, model, x, y, "exact")
    K = _build(c, model, x, y, structure="kfac", estimator="exact")
    E = _build(c, model, x, y, structure="ekfac", estimator="exact")
    assert relative(E.trace(), expected.trace()) <= TOLERANCE
    kfac, ekfac = K.to_dense(), E.to_dense()
    for spec in K.table.layers:
        order = block_order(K.shapes, spec)
        exact, k, e = (M[order.unsqueeze(1), order] for M in (expected, kfac, ekfac))
        assert relative(e.diagonal().sum(), exact.diagonal().sum()) <= TOLERANCE, spec.name
        assert (exact - e).norm() <= (exact - k).norm() + TOLERANCE * exact.norm(), spec.name
        if spec.structure("kfac") != "kfac":
            kept = k != 0
            assert relative(k[kept], exact[kept]) <= TOLERANCE, spec.name
            assert relative(k.diagonal(), exact.diagonal()) <= TOLERANCE, spec.name
    covered |= {(c.name, c.likelihood, "ekfac")}


@pytest.mark.parametrize("c", CASES, ids=name_of)
@pytest.mark.usefixtures("untyped")
def test_the_trace_of_ekfac_is_exact_and_its_error_not_above_that_of_kfac(c: Case, covered: set):
    _check_kronecker(c, covered)


@pytest.mark.parametrize("name", EVERY_LIKELIHOOD)
@pytest.mark.usefixtures("untyped")
def test_the_trace_of_ekfac_is_exact_under_other_likelihoods(name: str, covered: set):
    for likelihood in others(case(name)):
        _check_kronecker(with_likelihood(case(name), likelihood), covered)


@pytest.mark.parametrize("c", [c for c in CASES if has_loss(c)], ids=name_of)
@pytest.mark.usefixtures("untyped")
def test_the_hessian_equals_the_oracle(c: Case, covered: set):
    model, x, y = c.make()
    expected = oracles.hessian(model, x, y, c.loss)
    dense = lw.hessian(model, (x, y), loss=c.loss, structure="dense")
    block = lw.hessian(model, (x, y), loss=c.loss, structure="block")
    v = torch.randn(len(expected), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    implicit = lw.hessian(model, (x, y), loss=c.loss, structure="implicit")
    assert relative(dense.to_dense(), expected) <= TOLERANCE
    assert relative(implicit @ v, expected @ v) <= TOLERANCE
    errors = _errors(block, expected)
    assert all(error <= 1e-8 for error in errors.values()), errors
    covered |= {(c.name, c.likelihood, "hessian")}


@pytest.mark.parametrize("c", [c for c in CASES if "mask" in c.tags or "smoothing" in c.tags], ids=name_of)
def test_the_hessian_of_a_likelihood_equals_the_oracle(c: Case):
    model, x, y = c.make()
    H = lw.hessian(model, data_of(c, x, y), law_of(c), structure="dense")
    assert relative(H.to_dense(), oracles.loss_hessian(model, x, y, **c.oracle_options)) <= TOLERANCE


@pytest.mark.parametrize("c", [c for c in CASES if has_loss(c)], ids=name_of)
@pytest.mark.usefixtures("untyped")
def test_the_centered_moment_equals_the_oracle(c: Case, covered: set):
    model, x, y = c.make()
    expected = oracles.gradient_moment(model, x, y, c.loss, centered=True, examples=c.options.get("examples"))
    v = torch.randn(len(expected), dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def moment(structure: str) -> Any:
        return lw.gradient_moment(model, (x, y), loss=c.loss, structure=structure, centered=True)

    assert relative(moment("dense").to_dense(), expected) <= TOLERANCE
    assert relative(moment("implicit") @ v, expected @ v) <= 1e-8
    covered |= {(c.name, c.likelihood, "moment")}


@pytest.mark.parametrize("name", ["mlp", "sequence_linear", "conv2d_grouped", "layer_norm", "lstm", "multi_label"])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.usefixtures("untyped")
def test_the_moment_in_every_structure_equals_the_oracle(name: str, centered: bool):
    c = case(name)
    model, x, y = c.make()
    expected = oracles.gradient_moment(model, x, y, c.loss, centered=centered)
    for structure in ("dense", "block", "diag", "lowrank", "implicit"):
        C = lw.gradient_moment(model, (x, y), loss=c.loss, structure=structure, centered=centered)
        errors = _errors(C, expected)
        assert all(error <= 1e-8 for error in errors.values()), (structure, errors)
