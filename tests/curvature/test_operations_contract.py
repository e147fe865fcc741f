"""Every structure answers every operation as the same dense matrix does."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import assembled, block_order, close, psd_completion
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.errors import InputError, LayerwiseError, NumericalError, UnsupportedError
from layerwise.foundations.kronecker import EigenKronecker, Kronecker
from layerwise.foundations.linalg import Estimate

DAMPING = 0.3


class _Images(nn.Sequential):
    """A grouped convolution, layers with and without bias, a norm."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv1d(2, 4, 2, groups=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16, 3, bias=False),
            nn.LayerNorm(3),
            nn.Tanh(),
            nn.Linear(3, 3),
        )


class _Tokens(nn.Module):
    """An embedding, whose input factor is diagonal, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.twice, self.head = nn.Embedding(6, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.twice(self.twice(self.embed(x)).tanh()).tanh().mean(1))


@cache
def _problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = (_Images() if name == "images" else _Tokens()).double()
        x = torch.randn(30, 2, 5).double() if name == "images" else torch.randint(6, (30, 4))
        return model, x, torch.randint(3, (30,))


def _fisher(structure: Any, **options: Any) -> Callable[[str], Any]:
    def build(name: str) -> Any:
        model, x, y = _problem(name)
        return lw.fisher(model, (x, y), structure=structure, estimator="exact", **options)

    return build


def _hessian(structure: Any) -> Callable[[str], Any]:
    def build(name: str) -> Any:
        model, x, y = _problem(name)
        return lw.hessian(model, (x, y), loss=F.cross_entropy, structure=structure)

    return build


def _sum(*parts: tuple[float, str]) -> Callable[[str], Any]:
    def build(name: str) -> Any:
        total = None
        for factor, part in parts:
            scaled = factor * _matrix(part, name)
            total = scaled if total is None else total + scaled
        return total

    return build


def _layer(whole: str) -> Callable[[str], Any]:
    return lambda name: _matrix(whole, name).layer({"images": "0", "tokens": "embed"}[name])


MIXED = {"images": {"0": "kfac", "3": "ekfac", "*": "quasidiag"}, "tokens": {"embed": "kfac", "*": "block"}}
BUILDERS: dict[str, Callable[[str], Any]] = {
    "dense": _fisher("dense"),
    "block": _fisher("block"),
    "diag": _fisher("diag"),
    "quasidiag": _fisher("quasidiag"),
    "quasidiag-psd": _fisher("quasidiag", completion="psd"),
    "quasidiag-arrow": _fisher("quasidiag", completion="arrow"),
    "kfac": _fisher("kfac"),
    "kfac-exact": _fisher("kfac", damping_split="exact"),
    "kfac-equal": _fisher("kfac", damping_split="equal"),
    "kfac-reduce": _fisher("kfac", sharing="reduce"),
    "kfac-sua": _fisher("kfac", conv="sua"),
    "ekfac": _fisher("ekfac"),
    "ekfac-trace": _fisher("ekfac", damping_split="trace"),
    "ekfac-equal": _fisher("ekfac", damping_split="equal"),
    "ekfac-sua": _fisher("ekfac", conv="sua"),
    "lowrank": _fisher("lowrank"),
    "implicit": _fisher("implicit"),
    "mixed": lambda name: _fisher(MIXED[name])(name),
    "hessian-dense": _hessian("dense"),
    "hessian-block": _hessian("block"),
    "hessian-diag": _hessian("diag"),
    "hessian-implicit": _hessian("implicit"),
    "sum-kfac-diag": _sum((1.0, "kfac"), (0.5, "diag")),
    "sum-kfac-kfac": _sum((1.0, "kfac"), (1.0, "kfac-reduce")),
    "sum-implicit-ekfac": _sum((2.0, "implicit"), (0.25, "ekfac")),
    "difference": _sum((1.0, "lowrank"), (-0.5, "kfac")),
    "layer-dense": _layer("dense"),
    "layer-kfac": _layer("kfac"),
    "layer-ekfac": _layer("ekfac"),
    "layer-lowrank": _layer("lowrank"),
    "layer-implicit": _layer("implicit"),
    "layer-hessian": _layer("hessian-implicit"),
    "layer-sum": _layer("sum-kfac-diag"),
}
KEPT = [k for k in BUILDERS if not any(word in k for word in ("implicit", "sum", "difference", "layer-hessian"))]
"""Those that hold numbers of their own, and can be saved and converted."""


@cache
def _matrix(kind: str, name: str) -> Any:
    return BUILDERS[kind](name)


@dataclass
class _Subject:
    kind: str
    problem: str
    F: Any
    M: Tensor
    """The same matrix, dense."""

    @property
    def damping(self) -> float:
        """Enough to make twice the matrix positive definite."""
        return DAMPING + 2 * max(0.0, -float(torch.linalg.eigvalsh(self.M)[0]))

    def damped(self, damping: float, split: str | None = None) -> Tensor:
        """What is inverted: M + λI, or what the structure says it is instead."""
        if self.kind in ("quasidiag", "quasidiag-psd"):
            return psd_completion(self.F, _matrix("quasidiag-arrow", self.problem).to_dense(), damping)
        if self.kind == "mixed" and self.problem == "images":
            return _damped_by_layer(self.F, damping, split, quasidiag=psd_completion(self.F, self.M, damping))
        if self.kind.split("-")[0] in ("kfac", "ekfac", "mixed") or self.kind in ("layer-kfac", "layer-ekfac"):
            return _damped_by_layer(self.F, damping, split)
        return self.M + damping * torch.eye(len(self.M), dtype=self.M.dtype)


@pytest.fixture(params=["images", "tokens"])
def problem(request: pytest.FixtureRequest) -> str:
    return request.param


SLOW = ("hessian-implicit", "layer-hessian")
"""Each answer differentiates twice, which a grouped convolution makes slow: on the other problem alone."""
SUBJECTS = [(k, p) for k in BUILDERS for p in ("images", "tokens") if not (k in SLOW and p == "images")]


@pytest.fixture(params=SUBJECTS, ids="-".join)
def subject(request: pytest.FixtureRequest) -> _Subject:
    kind, problem = request.param
    if problem == "images":  # annotations are checked on the other one
        request.getfixturevalue("untyped")
    return _Subject(kind, problem, _matrix(kind, problem), _dense(kind, problem))


@cache
def _dense(kind: str, name: str) -> Tensor:
    return _matrix(kind, name).to_dense()


def _damped_by_layer(F: Any, damping: float, split: str | None, quasidiag: Tensor | None = None) -> Tensor:
    """Factored damping written out: (G + √λ/π I) ⊗ (A + π√λ I), and what it adds to EKFAC's eigenvalues."""
    blocks = {}
    for spec in F.table.layers:
        operator = F.operators[spec.name]
        order = block_order(F.shapes, spec)
        if isinstance(operator, Kronecker | EigenKronecker):
            own = split or operator.solve_split
            make = _damped_kronecker if isinstance(operator, Kronecker) else _damped_eigen_kronecker
            blocks[spec.name] = torch.block_diag(*make(operator, damping, own))
        elif quasidiag is not None:
            blocks[spec.name] = quasidiag[order.unsqueeze(1), order]
        else:
            blocks[spec.name] = operator.as_matrix() + damping * torch.eye(len(order), dtype=torch.float64)
    return assembled(F, blocks)


def _pi(split: str, mean_a: Tensor, mean_g: Tensor) -> float:
    return float((mean_a / mean_g).sqrt()) if split == "trace" else 1.0


def _damped_kronecker(operator: Kronecker, damping: float, split: str) -> list[Tensor]:
    found = []
    for A, G in zip(operator.A.dense(), operator.G, strict=True):
        eye_a, eye_g = (torch.eye(len(m), dtype=m.dtype) for m in (A, G))
        if split == "exact":
            found.append(torch.kron(G, A) + damping * torch.eye(len(A) * len(G), dtype=A.dtype))
            continue
        pi = _pi(split, A.diagonal().mean(), G.diagonal().mean())
        found.append(torch.kron(G + damping**0.5 / pi * eye_g, A + pi * damping**0.5 * eye_a))
    return found


def _damped_eigen_kronecker(operator: EigenKronecker, damping: float, split: str) -> list[Tensor]:
    k, _, i = operator.shape
    bases = operator.basis.dense(i, k, operator.scalings)
    found = []
    for U_A, U_G, s, s_A, s_G in zip(bases, operator.U_G, operator.scalings, operator.s_A, operator.s_G, strict=True):
        added = torch.full_like(s, damping)
        if split != "exact":
            pi = _pi(split, s_A.mean(), s_G.mean())
            added = added + damping**0.5 * (pi * s_G.unsqueeze(1) + s_A.unsqueeze(0) / pi)
        Q = torch.kron(U_G.contiguous(), U_A.contiguous())
        found.append(Q @ torch.diag((s + added).flatten()) @ Q.mT)
    return found


def _vector(subject: _Subject, columns: int | None = None) -> Tensor:
    shape = (len(subject.M),) if columns is None else (len(subject.M), columns)
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


# --- products ---------------------------------------------------------------------------------------------


def test_the_dense_matrix_is_symmetric_contract(subject: _Subject):
    close(subject.M, subject.M.mT)
    assert subject.F.shape == tuple(subject.M.shape)


def test_products_in_every_form_contract(subject: _Subject):
    """A ParamVector, a dict, a flat vector and columns; each comes back as what it was."""
    flat, columns = _vector(subject), _vector(subject, 3)
    close(subject.F @ flat, subject.M @ flat)
    close(subject.F @ columns, subject.M @ columns)
    v = subject.F._vector(flat)
    product = subject.F @ v
    assert isinstance(product, lw.ParamVector)
    close(product.flat(), subject.M @ flat)
    named = subject.F @ v.dict()
    assert type(named) is dict
    assert list(named) == subject.F.parameters()
    close(torch.cat([t.flatten() for t in named.values()]), subject.M @ flat)
    single = subject.F @ flat.float()
    assert single.dtype == torch.float32


def test_quad_contract(subject: _Subject):
    columns = _vector(subject, 3)
    close(subject.F.quad(columns), (columns * (subject.M @ columns)).sum(0))
    close(subject.F.quad(columns[:, 0]), columns[:, 0] @ subject.M @ columns[:, 0])
    close(subject.F.quad(subject.F._vector(columns[:, 0])), columns[:, 0] @ subject.M @ columns[:, 0])


def test_solve_contract(subject: _Subject):
    v = _vector(subject, 2)
    expected = torch.linalg.solve(subject.damped(subject.damping), v)
    close(subject.F.solve(v, subject.damping), expected, 1e-8)
    found = subject.F.solve(subject.F._vector(v[:, 0]), damping=subject.damping)
    assert isinstance(found, lw.ParamVector)
    close(found.flat(), expected[:, 0], 1e-8)


def test_solve_with_a_given_split_contract(subject: _Subject):
    v = _vector(subject)
    operators = getattr(subject.F, "operators", None)
    if operators is None:
        with pytest.raises(InputError, match="Kronecker"):
            subject.F.solve(v, subject.damping, damping_split="trace")
        return
    if not any(isinstance(op, Kronecker | EigenKronecker) for op in operators.values()):
        return
    for split in ("exact", "trace", "equal"):
        damped = subject.damped(subject.damping, split)
        expected = torch.linalg.solve(damped, v)
        close(subject.F.solve(v, subject.damping, damping_split=split), expected, 1e-8)
        close(subject.F.power(v, -1.0, subject.damping, damping_split=split), expected, 1e-8)
        close(subject.F.logdet(subject.damping, damping_split=split), torch.logdet(damped))


def test_power_contract(subject: _Subject):
    v = _vector(subject)
    values, U = torch.linalg.eigh(subject.damped(subject.damping, "exact"))
    for exponent in (-1.0, -0.5, 0.0, 0.5, 1.0, 2.0):
        expected = U @ (values**exponent * (U.mT @ v))
        close(subject.F.power(v, exponent, subject.damping), expected, 1e-8)


def test_integer_powers_without_damping_contract(subject: _Subject):
    v = _vector(subject)
    M = subject.M
    if subject.kind in ("quasidiag", "mixed"):  # a power is of the PSD form
        M = subject.damped(0.0, "exact")
    close(subject.F.power(v, 2.0), M @ (M @ v), 1e-8)


# --- numbers ----------------------------------------------------------------------------------------------


def test_trace_norm_and_diagonal_contract(subject: _Subject):
    trace, norm, diagonal = subject.F.trace(), subject.F.frobenius(), subject.F.diagonal()
    assert not isinstance(trace, Estimate)
    assert not isinstance(norm, Estimate)
    assert diagonal.standard_error is None
    close(trace, subject.M.trace())
    close(norm, subject.M.norm())
    assert list(diagonal) == subject.F.parameters()
    close(diagonal.flat(), subject.M.diagonal())


def test_logdet_contract(subject: _Subject):
    found = subject.F.logdet(subject.damping)
    assert not isinstance(found, Estimate)
    close(found, torch.logdet(subject.damped(subject.damping, "exact")))


@pytest.mark.usefixtures("untyped")
def test_eigenvalues_and_eigenvectors_contract(subject: _Subject):
    every = torch.linalg.eigvalsh(subject.M)
    size = float(subject.M.norm())
    for k in (None, 1, 4):
        expected = every[-(k or len(every)) :]
        close(subject.F.eigenvalues(k), expected, 1e-8, scale=size)
        values, vectors = subject.F.eigh(k)
        assert vectors.shape == (len(every), k or len(every))
        close(values, expected, 1e-8, scale=size)
        close(subject.M @ vectors, vectors * values, 1e-8, scale=size)
        close(vectors.mT @ vectors, torch.eye(len(values), dtype=torch.float64), 1e-8)


@pytest.mark.usefixtures("untyped")
def test_samples_have_the_inverse_as_covariance_contract(subject: _Subject):
    n = 500
    drawn = subject.F.sample(n, damping=subject.damping, generator=torch.Generator().manual_seed(0))
    assert isinstance(drawn[0], lw.ParamVector)
    z = torch.stack([v.flat() for v in drawn])
    expected = torch.linalg.inv(subject.damped(subject.damping, "exact"))
    found = z.mT @ z / n
    error = ((expected.square() + torch.outer(expected.diagonal(), expected.diagonal())) / n).sqrt()
    # 5 standard errors for one entry; thousands are compared, so the largest may reach 6.
    assert ((found - expected).abs() <= 6 * error).all()
    mean = z.mean(0)
    assert (mean.abs() <= 5 * (expected.diagonal() / n).sqrt()).all()
    again = subject.F.sample(2, damping=subject.damping, generator=7)
    same = subject.F.sample(2, damping=subject.damping, generator=7)
    assert all(torch.equal(a.flat(), b.flat()) for a, b in zip(again, same, strict=True))


# --- parts, sums, places ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("untyped")
def test_sums_and_multiples_contract(subject: _Subject):
    v = _vector(subject)
    other = subject.F + subject.F
    close(other @ v, 2 * subject.M @ v)
    for factor in (0.0, 2.0, -1.5):
        scaled = factor * subject.F
        close(scaled @ v, factor * (subject.M @ v), scale=1e-12)
        close(scaled.to_dense(), factor * subject.M, scale=1e-12)
        close(scaled.trace(), factor * subject.M.trace(), scale=1e-12)
        close(scaled.diagonal().flat(), factor * subject.M.diagonal(), scale=1e-12)
        close(scaled.frobenius(), abs(factor) * subject.M.norm(), scale=1e-12)
    close((subject.F / 4) @ v, subject.M @ v / 4)
    close((subject.F - 0.25 * subject.F) @ v, 0.75 * subject.M @ v)


def test_a_multiple_solves_as_its_dense_matrix_contract(subject: _Subject):
    if "quasidiag" in subject.kind or subject.kind == "mixed":
        pytest.skip("damping acts on the statistics")
    v = _vector(subject)
    M = 2 * subject.M + subject.damping * torch.eye(len(subject.M), dtype=torch.float64)
    split = {"damping_split": "exact"} if hasattr(subject.F, "operators") else {}
    close((2.0 * subject.F).solve(v, subject.damping, **split), torch.linalg.solve(M, v), 1e-8)
    close((2.0 * subject.F).logdet(subject.damping), torch.logdet(M))


@pytest.mark.parametrize("kind", [k for k in BUILDERS if not k.startswith("layer-")])
def test_layers_are_diagonal_blocks_contract(kind: str, problem: str):
    F, M = _matrix(kind, problem), _dense(kind, problem)
    model = _problem(problem)[0]
    where = lw.ParamVector.from_flat(torch.arange(len(M), dtype=torch.float64), model)
    names = {"images": ("3", "4", "6"), "tokens": ("embed", "twice", "head")}[problem]
    for name in names:
        kept = [p for p in where if p.startswith(f"{name}.")]
        order = where.restrict(kept).flat().long()
        layer = F.layer(name)
        assert layer.parameters() == kept
        close(layer.to_dense(), M[order.unsqueeze(1), order])
    with pytest.raises(LayerwiseError, match="Available: "):
        F.layer("no such layer")


def test_another_dtype_contract(subject: _Subject):
    if "implicit" in subject.kind or subject.kind in ("layer-hessian", "sum-implicit-ekfac"):
        with pytest.raises(InputError, match="Move the model"):
            subject.F.to(dtype=torch.float32)
        return
    single = subject.F.to(dtype=torch.float32)
    assert single.dtype == torch.float32
    v = _vector(subject).float()
    close(single @ v, subject.M @ v.double(), 1e-4)
    close(single.to(dtype=torch.float64).to_dense(), subject.M, 1e-5)


@pytest.mark.parametrize("kind", KEPT)
def test_save_and_load_contract(kind: str, problem: str, tmp_path):
    F = _matrix(kind, problem)
    path = tmp_path / "matrix.safetensors"
    F.save(path)
    loaded = lw.load(path)
    v = torch.randn(F.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert type(loaded) is type(F)
    assert loaded.structure == F.structure
    assert loaded.parameters() == F.parameters()
    assert loaded.is_psd == F.is_psd
    close(loaded.to_dense(), F.to_dense(), 1e-13)  # not bit for bit: a loaded tensor has other strides
    damping = _Subject(kind, problem, F, _dense(kind, problem)).damping
    close(loaded.solve(v, damping), F.solve(v, damping), 1e-11)  # the same split and completion
    close(loaded.diagonal().flat(), F.diagonal().flat(), 1e-13)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("kind", ["implicit", "hessian-implicit", "sum-kfac-diag", "layer-implicit"])
def test_what_keeps_nothing_is_not_saved_contract(kind: str, tmp_path):
    with pytest.raises(UnsupportedError, match="dense, block, diag"):
        _matrix(kind, "images").save(tmp_path / "matrix.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("untyped")
def test_scipy_finds_the_largest_eigenvalues_contract(subject: _Subject):
    operator = subject.F.to_scipy()
    found = eigsh(operator, k=3, which="LM", return_eigenvectors=False, v0=_vector(subject).numpy())
    expected = torch.linalg.eigvalsh(subject.M)
    expected = expected[expected.abs().argsort()[-3:]]
    close(torch.as_tensor(found).sort().values, expected.sort().values, 1e-8)
    columns = _vector(subject, 2)
    close(torch.as_tensor(operator @ columns.numpy()), subject.M @ columns)


# --- what cannot be done ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "block", "kfac-exact", "ekfac", "lowrank", "implicit", "diag"])
def test_a_singular_matrix_asks_for_damping_contract(kind: str):
    """The embedding of a token that never occurs has no curvature."""
    model, x, y = _problem("tokens")
    structure, *split = kind.split("-")
    options = {"damping_split": split[0]} if split else {}
    F = lw.fisher(model, (x.clamp_max(4), y), structure=structure, estimator="exact", **options)
    v = lw.ParamVector.randn(model, generator=0)
    with pytest.raises(NumericalError, match="damping"):
        F.solve(v)
    with pytest.raises(NumericalError, match="damping"):
        F.logdet()


def test_an_indefinite_arrow_is_refused_contract():
    torch.manual_seed(0)
    model, x = nn.Linear(6, 2).double(), torch.randn(3, 6).double() + 2
    Q = lw.fisher(model, (x, torch.randn(3, 2).double()), "gaussian", "quasidiag", "exact", completion="arrow")
    assert Q.eigenvalues()[0] < 0
    with pytest.raises(NumericalError, match="psd"):
        Q.solve(lw.ParamVector.randn(model, generator=0), 1e-6)
    psd = lw.fisher(model, (x, torch.randn(3, 2).double()), "gaussian", "quasidiag", "exact", completion="psd")
    assert psd.eigenvalues()[0] >= 0
    close(psd.trace(), Q.trace())


def test_matrices_on_other_parameters_are_refused_contract():
    with pytest.raises(InputError, match="same parameters"):
        _matrix("kfac", "images") + _matrix("kfac", "tokens")
    with pytest.raises(InputError, match="exactly these"):
        _matrix("kfac", "images") @ lw.ParamVector.randn(_problem("tokens")[0], generator=0)
    for k in (0, 10_000):
        with pytest.raises(InputError, match="k="):
            _matrix("kfac", "images").eigenvalues(k)
