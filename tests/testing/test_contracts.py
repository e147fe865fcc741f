"""Contracts hold for what the library has, and fail, by name, for what is deliberately broken."""

import doctest
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise as lw
from layerwise.curvature import diagonal as diagonal_module
from layerwise.curvature.eigen_kronecker import EigenKroneckerApproximation
from layerwise.foundations.kronecker import Basis, EigenKronecker, InputFactor, Kronecker
from layerwise.foundations.operators import OPERATORS, Block, BlockOperator, Diagonal
from layerwise.foundations.quasi_diagonal import QuasiDiagonal
from layerwise.layers.form import RULES, Form, LayerRule, Part
from layerwise.layers.rules.conv import ConvRule
from layerwise.layers.rules.linear import LinearRule
from layerwise.testing import case, check_approximation, check_layer_rule, check_operator
from layerwise.testing.contracts import approximation, layer_rule, operator


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize("module", [approximation, layer_rule, operator])
def test_the_examples_in_docstrings_run(module):
    assert doctest.testmod(module, extraglobs={"torch": torch, "nn": nn}).failed == 0


# --- layer rules ------------------------------------------------------------------------------------------

TOKENS = torch.tensor([[1, 2, 0, 0], [3, 3, 4, 0], [5, 1, 2, 6]])
LAYERS = {
    "linear": (lambda: nn.Linear(3, 2), _draw(4, 3)),
    "linear_positions": (lambda: nn.Linear(3, 2, bias=False), _draw(3, 5, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, stride=2, padding=1, groups=2), _draw(3, 2, 6)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (2, 3), padding=1, padding_mode="reflect"), _draw(3, 2, 4, 4)),
    "conv2d_1x1": (lambda: nn.Conv2d(4, 2, 1, stride=2, groups=2), _draw(3, 4, 3, 3)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2, dilation=2), _draw(3, 2, 3, 3, 4)),
    "conv_transpose": (lambda: nn.ConvTranspose2d(2, 4, 2, 2, groups=2), _draw(3, 2, 2, 3)),
    "layer_norm": (lambda: nn.LayerNorm([2, 4]), _draw(3, 2, 4)),
    "rms_norm": (lambda: nn.RMSNorm(4), _draw(3, 4)),
    "group_norm": (lambda: nn.GroupNorm(2, 4), _draw(3, 4, 5)),
    "batch_norm": (lambda: nn.BatchNorm1d(4), _draw(3, 4, 2)),
    "instance_norm": (lambda: nn.InstanceNorm1d(4, affine=True), _draw(3, 4, 5)),
    "embedding": (lambda: nn.Embedding(7, 3, padding_idx=0), TOKENS),
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), (_draw(3, 5, 4),) * 3),
    "attention_widths": (
        lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True),
        (_draw(3, 5, 4), _draw(3, 4, 3), _draw(3, 4, 2)),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_our_layer_rules_keep_the_contract(name: str):
    make, x = LAYERS[name]
    check_layer_rule(make(), x)


def test_parameters_left_to_the_fall_back_must_be_named():
    module = nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True)
    x = (_draw(3, 5, 4),) * 3
    check_layer_rule(module, x, uncovered=("bias_k", "bias_v"))
    with pytest.raises(AssertionError, match=r"AttentionRule.*no form covers all of parameter 'bias_k'"):
        check_layer_rule(module, x)


def test_the_module_given_is_left_alone():
    module = nn.Linear(3, 2).train()
    module.bias.requires_grad_(False)
    before = {k: t.clone() for k, t in module.state_dict().items()}
    check_layer_rule(module, _draw(4, 3))
    assert module.training
    assert not module.bias.requires_grad
    assert module.weight.dtype == torch.float32
    assert all(torch.equal(t, before[k]) for k, t in module.state_dict().items())


class Mine(nn.Module):
    """A third party's layer: ``y = x W + b``, the weight stored [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Square(Mine):
    """The same with as many inputs as outputs, where a transposed weight fits without a word."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))


class MineRule(LayerRule[Mine]):
    def forms(self, module: Mine, parts: dict[str, Part]) -> dict[str, Form]:
        i, o = module.weight.shape
        weight = parts.get("weight")
        return {"": Form(1, o, i if weight else 0, weight, parts.get("bias"), transposed=True)}

    def lead(self, module: Mine, site: str, x: Tensor) -> int:
        return x.ndim - 1

    def inputs(self, module: Mine, site: str, x: Tensor) -> Tensor:
        return x.unsqueeze(-2).unsqueeze(-2)

    def outgrads(self, module: Mine, site: str, dy: Tensor) -> Tensor:
        return dy.unsqueeze(-2).unsqueeze(-2)


@pytest.fixture
def registered() -> Iterator[None]:
    """Whatever a test registers is forgotten after it."""
    RULES.find(nn.Module)
    before = dict(RULES._entries)
    yield
    RULES._entries.clear()
    RULES._entries.update(before)


@pytest.mark.usefixtures("registered")
def test_a_rule_of_a_third_party_passes():
    with pytest.raises(AssertionError, match="Mine has no layer rule"):
        check_layer_rule(Mine(), _draw(4, 3))
    lw.layer_rule(Mine)(MineRule)
    check_layer_rule(Mine(), _draw(4, 3))
    check_layer_rule(Mine(), _draw(4, 3), dtype=torch.float32, tol=1e-4)
    check_layer_rule(Square(), _draw(4, 2, 3))


class Transposed(MineRule):
    def forms(self, module: Mine, parts: dict[str, Part]) -> dict[str, Form]:
        return {site: replace(form, transposed=False) for site, form in super().forms(module, parts).items()}


class ForgetsBias(MineRule):
    def forms(self, module: Mine, parts: dict[str, Part]) -> dict[str, Form]:
        return {site: replace(form, bias=None) for site, form in super().forms(module, parts).items()}


class AssumesWeight(MineRule):
    def forms(self, module: Mine, parts: dict[str, Part]) -> dict[str, Form]:
        return {"": Form(1, 3, 3, parts["weight"], parts.get("bias"), transposed=True)}


class KeepsInputs(MineRule):
    def forms(self, module: Mine, parts: dict[str, Part]) -> dict[str, Form]:
        return {"": Form(1, 3, 3, parts.get("weight"), parts.get("bias"), transposed=True)}


class WrongSize(MineRule):
    def forms(self, module: Mine, parts: dict[str, Part]) -> dict[str, Form]:
        return {"": Form(1, 3, 2, parts.get("weight"), parts.get("bias"), transposed=True)}


class SwapsPositions(MineRule):
    def inputs(self, module: Mine, site: str, x: Tensor) -> Tensor:
        return super().inputs(module, site, x).flip(0)


class DropsAnAxis(MineRule):
    def inputs(self, module: Mine, site: str, x: Tensor) -> Tensor:
        return x.unsqueeze(-2)


class FirstCotangentOnly(MineRule):
    def outgrads(self, module: Mine, site: str, dy: Tensor) -> Tensor:
        return super().outgrads(module, site, dy[:1].expand_as(dy))


class OneLeadingAxis(MineRule):
    def inputs(self, module: Mine, site: str, x: Tensor) -> Tensor:
        a = super().inputs(module, site, x)
        return a if x.ndim == 2 else a.flip(1)


class BadMoment(MineRule):
    def input_moment(self, module: Mine, site: str, x: Tensor):
        rows = x.reshape(-1, x.shape[-1])
        return (rows.mT @ rows).unsqueeze(0), rows.mean(0, keepdim=True), len(rows)


class BadCount(MineRule):
    def channel_moment(self, module: Mine, site: str, x: Tensor):
        rows = x.reshape(-1, x.shape[-1])
        return (rows.mT @ rows).unsqueeze(0), rows.sum(0, keepdim=True), 1


class Refuses(MineRule):
    def refuses(self, module: Mine) -> str | None:
        return "not today"


BROKEN_RULES = {
    Transposed: "per-example gradients of 'weight'",
    ForgetsBias: "no form covers all of parameter 'bias'",
    AssumesWeight: "'weight' frozen raised KeyError",
    KeepsInputs: "weight_inputs is 3 though no weight takes part",
    WrongSize: r"K·O·I = 1·3·2 does not fit weight \(3, 3\)",
    SwapsPositions: "per-example gradients of 'weight'",
    DropsAnAxis: r"inputs has shape \(4, 1, 3\), expected \(4, 'S', 1, 3\)",
    FirstCotangentOnly: r"per-example gradients of 'weight' \(site '', V=3\)",
    OneLeadingAxis: "per-example gradients of 'weight'",
    BadMoment: "Σ a by input_moment",
    BadCount: "channel_moment counts 1 rows, inputs has 4",
    Refuses: "refuses this module: not today",
}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("rule", BROKEN_RULES, ids=lambda rule: rule.__name__)
def test_a_broken_rule_is_named(rule: type[LayerRule]):
    lw.layer_rule(Square)(rule)
    with pytest.raises(AssertionError, match=f"{rule.__name__} for Square.*{BROKEN_RULES[rule]}"):
        check_layer_rule(Square(), _draw(4, 3))


class Doubled(nn.Linear):
    """A linear layer by type, with another function of its weight."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, 2 * self.weight, self.bias)


def test_a_layer_that_is_not_what_its_type_says_is_named():
    with pytest.raises(AssertionError, match="LinearRule for Doubled: per-example gradients of 'weight'"):
        check_layer_rule(Doubled(3, 2), _draw(4, 3))


@pytest.mark.usefixtures("registered")
def test_a_fast_moment_that_forgets_the_padding_is_named():
    class NoPadding(ConvRule):
        def input_moment(self, module, site, x):
            bare = nn.Conv1d(2, 2, 3, dtype=x.dtype)
            return super().input_moment(bare, site, x)

    lw.layer_rule(nn.Conv1d)(NoPadding)
    with pytest.raises(AssertionError, match="NoPadding for Conv1d: Σ aaᵀ by input_moment"):
        check_layer_rule(nn.Conv1d(2, 2, 3, padding=1), _draw(3, 2, 5))


def test_a_linear_rule_is_found_for_subclasses():
    class Narrow(nn.Linear):
        pass

    assert isinstance(RULES.find(Narrow), LinearRule)
    check_layer_rule(Narrow(3, 2), _draw(4, 3))


# --- operators --------------------------------------------------------------------------------------------


def _psd(*shape: int, size: int) -> Tensor:
    rows = _draw(*shape, size, size + 1)
    return rows @ rows.mT / size


def _quasi(completion: str | None) -> QuasiDiagonal:
    g = _draw(5, 2, 2, 4)  # statistics of real gradients: κ² ≤ D f
    D, f = g[..., :-1].square().mean(0), g[..., -1].square().mean(0)
    return QuasiDiagonal(D, f, (g[..., :-1] * g[..., -1:]).mean(0), completion)


def _eigen(taps: int = 1) -> EigenKronecker:
    basis = torch.linalg.eigh(_psd(2, size=3)).eigenvectors
    U_G = torch.linalg.eigh(_psd(2, size=2)).eigenvectors
    s_A = _draw(2, 3).square().repeat_interleave(taps, -1)
    return EigenKronecker(Basis(basis, taps), U_G, _draw(2, 2, 3 * taps).square(), s_A, _draw(2, 2).square())


OPERATORS_OF_OURS = {
    "diagonal": lambda: Diagonal(_draw(2, 3, 2).square()),
    "diagonal_indefinite": lambda: Diagonal(_draw(2, 3, 2), psd=False),
    "one_number": lambda: Diagonal(_draw(1, 1, 1).square()),
    "block": lambda: Block(_psd(1, size=6), (1, 2, 3)),
    "block_singular": lambda: Block(_draw(1, 6, 2) @ _draw(1, 6, 2).mT, (1, 2, 3)),
    "block_indefinite": lambda: Block(_psd(1, size=6) - 2 * torch.eye(6), (1, 2, 3), psd=False),
    "block_of_groups": lambda: Block(_psd(3, size=4), (3, 2, 2)),
    "kronecker": lambda: Kronecker(InputFactor(_psd(1, size=4)), _psd(1, size=3)),
    "kronecker_groups": lambda: Kronecker(InputFactor(_psd(2, size=3)), _psd(2, size=2), "equal"),
    "kronecker_one_hot": lambda: Kronecker(InputFactor(_draw(1, 5).square()), _psd(1, size=3), "exact"),
    "kronecker_channels": lambda: Kronecker(InputFactor(_psd(2, size=2), taps=3), _psd(2, size=2)),
    "eigen_kronecker": _eigen,
    "eigen_kronecker_channels": lambda: _eigen(taps=2),
    "quasi_diagonal": lambda: _quasi(None),
    "quasi_diagonal_psd": lambda: _quasi("psd"),
    "quasi_diagonal_arrow": lambda: _quasi("arrow"),
}


@pytest.mark.parametrize("name", OPERATORS_OF_OURS)
def test_our_operators_keep_the_contract(name: str):
    check_operator(OPERATORS_OF_OURS[name]())


def test_every_operator_of_ours_is_among_them():
    ours = {kind for kind, cls in OPERATORS.items() if cls.__module__.startswith("layerwise.foundations")}
    assert ours == {make().kind for make in OPERATORS_OF_OURS.values()}


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Operators made in a test do not stay among those that can be loaded."""
    before = dict(OPERATORS)
    yield
    OPERATORS.clear()
    OPERATORS.update(before)


def _broken(name: str, wrong) -> BlockOperator:
    """A diagonal operator with one method of another's making."""
    cls = type("Broken", (Diagonal,), {name: wrong, "kind": "broken"})
    return dataclass(frozen=True, eq=False)(cls)(_draw(2, 2, 3).square() + 0.1)


BROKEN_OPERATORS = {
    "trace": (lambda self: self.values.mean(), "trace differs"),
    "frobenius_squared": (lambda self: self.values.square().sum().sqrt(), "frobenius_squared differs"),
    "diagonal": (lambda self: self.values.flip(0), "diagonal differs"),
    "mv": (lambda self, X: self.values * X.abs(), "mv, against as_matrix"),
    "as_matrix": (lambda self: torch.eye(12, dtype=torch.float64), "mv, against as_matrix"),
    "eigenvalues": (lambda self: self.values.flatten(), "eigenvalues differs"),
    "eigenvectors": (lambda self, chosen: _draw(len(chosen), *self.shape), "eigenvectors"),
    "scaled": (lambda self, c: type(self)(self.values * c**2), r"scaled\(2.5\)"),
    "plus": (lambda self, other: self, r"M.plus\(2 M\)"),
    "options": (lambda self: {"psd": False}, "changes is_psd"),
    "logdet": (lambda self, damping, split=None: self.values.log().sum(), "logdet"),
    "power": (lambda self, X, p, damping, split=None: X * self.values**p, r"power\(1.0, damping="),
    "sample": (
        lambda self, n, damping, generator: (
            torch.randn(n, *self.shape, generator=generator, dtype=torch.float64) / (self.values + damping)
        ),
        "covariance of the samples",
    ),
    "solve": (lambda self, X, damping, split=None: X / self.values, r"solve\(X, damping="),
}


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("name", BROKEN_OPERATORS)
def test_a_broken_operator_is_named(name: str):
    wrong, message = BROKEN_OPERATORS[name]
    with pytest.raises(AssertionError, match=f"operator Broken.*({message})"):
        check_operator(_broken(name, wrong))


def test_a_matrix_that_is_not_definite_though_it_says_so_is_named():
    indefinite = _psd(1, size=6) - 2 * torch.eye(6)
    with pytest.raises(AssertionError, match="is_psd is True, but the smallest eigenvalue is -"):
        check_operator(Block(indefinite, (1, 2, 3), psd=True))


def test_a_matrix_that_is_not_symmetric_is_named():
    with pytest.raises(AssertionError, match="symmetric"):
        check_operator(Block(_draw(1, 6, 6), (1, 2, 3), psd=False))


def test_a_negative_multiple_of_the_completed_form_is_refused():
    """The completion divides by f: with f < 0 it would silently be another matrix."""
    with pytest.raises(lw.LayerwiseError, match="factor of -1"):
        _quasi("psd").scaled(-1.0)
    M = _quasi("arrow").as_matrix()
    assert torch.equal(_quasi("arrow").scaled(-1.0).as_matrix(), -M)


# --- approximations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "conv2d_grouped", "layer_norm", "embedding", "attention_bias_kv"])
@pytest.mark.parametrize("structure", ["diag", "quasidiag", "block", "kfac", "ekfac"])
def test_our_structures_keep_the_contract(structure: str, name: str):
    check_approximation(structure, case(name))


@pytest.mark.parametrize("structure", ["dense", "lowrank", "implicit"])
def test_whole_matrices_keep_the_contract(structure: str):
    check_approximation(structure, case("mlp"))


@pytest.mark.parametrize("name", ["regression_masked", "flattened_outputs", "class_weights", "segmentation"])
def test_options_of_the_likelihood_are_handed_on(name: str):
    check_approximation("block", case(name))


def test_a_wrong_diagonal_is_named(monkeypatch: pytest.MonkeyPatch):
    def finish(self, count):
        return Diagonal(self.total)

    monkeypatch.setattr(diagonal_module.DiagonalApproximation, "finish", finish)
    with pytest.raises(AssertionError, match=r"structure 'diag' on case 'mlp', layer '0' \(diag\): the trace"):
        check_approximation("diag", case("mlp"))


def test_scalings_in_the_wrong_places_are_named(monkeypatch: pytest.MonkeyPatch):
    """The trace is right, the matrix is worse than K-FAC."""

    def finish(self, count):
        shuffled = self.scalings.flatten().sort().values.view_as(self.scalings).flip(1)
        return EigenKronecker(self.basis, self.U_G, shuffled / count, self.s_A, self.s_G / count)

    monkeypatch.setattr(EigenKroneckerApproximation, "finish", finish)
    with pytest.raises(AssertionError, match=r"'ekfac' on case 'mlp', layer .* is above K-FAC's"):
        check_approximation("ekfac", case("mlp"))


def test_an_indefinite_operator_is_named(monkeypatch: pytest.MonkeyPatch):
    def finish(self, count):
        return Diagonal(self.total / count - 10)

    monkeypatch.setattr(diagonal_module.DiagonalApproximation, "finish", finish)
    with pytest.raises(AssertionError, match="has an eigenvalue -"):
        check_approximation("diag", case("mlp"))
