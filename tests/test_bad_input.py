"""Bad input: one clear error (given, expected, do), the model exactly as it was, and nothing lost."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import layerwise as lw
from error_sentences import THREE, WORDED
from layerwise.foundations.errors import (
    FileFormatError,
    InputError,
    InteractionError,
    LayerwiseError,
    MemoryBudgetError,
    NameLookupError,
    NumericalError,
    UnsupportedError,
)

N, D, C = 5, 3, 3

# --- what must not change ----------------------------------------------------------------------------------

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")


def _bits(t: Tensor | None) -> Any:
    """A tensor's own bits, NaN included."""
    if t is None or t.device.type == "meta" or nn.parameter.is_lazy(t):
        return None
    return t.dtype, tuple(t.shape), t.detach().reshape(-1).contiguous().view(torch.uint8).tolist()


def _snapshot(model: nn.Module) -> dict[str, Any]:
    named = list(model.named_modules())
    return {
        "parameters": {k: (id(p), _bits(p), _bits(p.grad), p.requires_grad) for k, p in model.named_parameters()},
        "buffers": {k: (id(b), _bits(b)) for k, b in model.named_buffers()},
        "training": {k: m.training for k, m in named},
        "hooks": {(k, h): list(getattr(m, h)) for k, m in named for h in HOOKS},
        "attributes": {k: {a: id(v) for a, v in vars(m).items()} for k, m in named},
        "random": torch.get_rng_state().tolist(),
        "attention fast path": torch.backends.mha.get_fastpath_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
    }


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    before = _snapshot(model)
    yield
    after = _snapshot(model)
    for what in before:
        assert before[what] == after[what], what


@contextmanager
def _refused(model: nn.Module, error: type[LayerwiseError], *words: str) -> Iterator[None]:
    """The error, worded as all are, and the model untouched."""
    with _unchanged(model), pytest.raises(LayerwiseError) as caught:
        yield
    message = str(caught.value)
    assert isinstance(caught.value, error), caught.value
    assert re.search(WORDED, message), message
    for word in words:
        assert word in message, message


class Everything(nn.Module):
    """Attention, a norm, dropout, a bare parameter, spectral norm in train mode, a frozen bias, a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.utils.parametrizations.spectral_norm(nn.Linear(D, 4))
        self.mix = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.drop, self.scale = nn.LayerNorm(4), nn.Dropout(0.2), nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, C)
        self.head.bias.requires_grad_(False)
        self.scale.grad = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.cell(x).unsqueeze(1)
        return self.head(self.drop(self.norm(self.mix(h, h, h)[0])).squeeze(1) * self.scale)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Everything().train()


def _linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, C))


def _x(n: int = N) -> Tensor:
    return torch.randn(n, D, generator=torch.Generator().manual_seed(1))


def _y(n: int = N) -> Tensor:
    return torch.randint(C, (n,), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def untyped() -> Iterator[None]:
    """The library as users have it, without the type checker that the tests add to it."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# --- data --------------------------------------------------------------------------------------------------


def _with_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x.view(-1)[1] = torch.nan
    return x


def _generator() -> Iterator[tuple[Tensor, Tensor]]:
    yield _x(), _y()


def _shuffled() -> DataLoader:
    return DataLoader(TensorDataset(_x(8), _y(8)), batch_size=4, shuffle=True, generator=torch.Generator())


class Shrinks:
    """Fewer batches at every pass."""

    def __init__(self) -> None:
        self.left = 3

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.left -= 1
        return iter([(_x(), _y())] * (self.left + 1))


CALLS: dict[str, tuple[Callable[[nn.Module], Any], type[LayerwiseError], tuple[str, ...]]] = {
    "no data": (lambda m: lw.fisher(m, None), InputError, ("data=None",)),
    "empty data": (lambda m: lw.fisher(m, []), InputError, ("without a single batch",)),
    "empty loader": (lambda m: lw.fisher(m, DataLoader([])), InputError, ("without a single batch",)),
    "empty data, Hessian": (lambda m: lw.hessian(m, [], loss=F.cross_entropy, structure="dense"), InputError, ()),
    "a number as data": (lambda m: lw.fisher(m, 3), InputError, ("data of type int",)),
    "a dataset as data": (
        lambda m: lw.fisher(m, TensorDataset(_x(), _y())),
        InputError,
        ("data of type TensorDataset",),
    ),
    "arrays as data": (lambda m: lw.fisher(m, (_x().numpy(), _y().numpy())), InputError, ("type ndarray",)),
    "a batch of four": (lambda m: lw.fisher(m, [(_x(), _y(), None, None)]), InputError, ("batch 0 of type tuple",)),
    "an empty batch": (lambda m: lw.fisher(m, (_x(0), _y(0))), InputError, ("0 examples",)),
    "an empty batch among others": (
        lambda m: lw.fisher(m, [(_x(), _y()), (_x(0), _y(0))], structure="diag"),
        InputError,
        ("0 examples",),
    ),
    "an empty batch, Hessian": (
        lambda m: lw.hessian(m, [(_x(), _y()), (_x(0), _y(0))], loss=F.cross_entropy, structure="dense"),
        InputError,
        ("0 examples",),
    ),
    "an empty batch, implicit": (
        lambda m: lw.fisher(m, [(_x(), _y()), (_x(0), _y(0))], structure="implicit") @ lw.ParamVector.zeros(m),
        InputError,
        ("0 examples",),
    ),
    "an input without axes": (lambda m: lw.fisher(m, (torch.tensor(1.0), _y())), InputError, ("batch axis",)),
    "an input with NaN": (lambda m: lw.fisher(m, (_with_nan(_x()), _y())), InputError, ("batch 0", "NaN")),
    "an input with NaN, later": (
        lambda m: lw.fisher(m, [(_x(), _y()), (_with_nan(_x()), _y())]),
        InputError,
        ("batch 1", "NaN"),
    ),
    "an input with NaN, Hessian": (
        lambda m: lw.hessian(m, (_with_nan(_x()), _y()), loss=F.cross_entropy, structure="diag"),
        InputError,
        ("batch 0", "NaN"),
    ),
    "an infinite input": (lambda m: lw.fisher(m, (_x() / 0, _y())), InputError, ("infinite",)),
    "a target with NaN": (
        lambda m: lw.fisher(m, (_x(), _with_nan(_x())), "gaussian", estimator="empirical"),
        InputError,
        ("batch 0", "NaN"),
    ),
    "a target with NaN, moment": (
        lambda m: lw.gradient_moment(m, (_x(), _with_nan(_x())), loss=F.mse_loss),
        InputError,
        ("batch 0", "NaN"),
    ),
    "a batch on another device": (lambda m: lw.fisher(m, (_x().to("meta"), _y())), InputError, ("meta", "cpu")),
    "a target on another device": (lambda m: lw.fisher(m, (_x(), _y().to("meta"))), InputError, ("meta", "cpu")),
    "a generator, two passes": (
        lambda m: lw.fisher(m, _generator(), structure="ekfac"),
        InputError,
        ("generator", "DataLoader"),
    ),
    "a generator, implicit": (lambda m: lw.fisher(m, _generator(), structure="implicit"), InputError, ("generator",)),
    "a generator, Hessian": (lambda m: lw.hessian(m, _generator(), loss=F.cross_entropy), InputError, ("generator",)),
    "a shuffled loader": (lambda m: lw.fisher(m, _shuffled(), structure="ekfac"), InputError, ("shuffle=False",)),
    "fewer batches the second time": (lambda m: lw.fisher(m, Shrinks(), structure="ekfac"), InputError, ("batch 2",)),
    # --- targets ---
    "float labels": (lambda m: lw.fisher(m, (_x(), _y().float())), InputError, ("torch.float32", "y.long()")),
    "bool labels": (lambda m: lw.fisher(m, (_x(), _y().bool())), InputError, ("torch.bool",)),
    "labels of another length": (lambda m: lw.fisher(m, (_x(), _y(N - 1))), InputError, (f"({N - 1},)", f"({N},)")),
    "labels with an axis too many": (lambda m: lw.fisher(m, (_x(), _y()[:, None])), InputError, (f"({N}, 1)",)),
    "a label out of range": (lambda m: lw.fisher(m, (_x(), _y() + 1)), InputError, ("label 3", "0 … 2")),
    "a negative label": (lambda m: lw.fisher(m, (_x(), _y() - 1)), InputError, ("label -1",)),
    "no labels, empirical": (
        lambda m: lw.fisher(m, _x(), estimator="empirical"),
        InputError,
        ("without a target", "(x, y)"),
    ),
    "no labels, class weights": (lambda m: lw.fisher(m, _x(), weight=torch.ones(C)), InputError, ("no target",)),
    "no labels, moment": (lambda m: lw.gradient_moment(m, _x(), loss=F.cross_entropy), InputError, ("target",)),
    "integer values": (
        lambda m: lw.fisher(m, (_x(), torch.ones(N, C).long()), "gaussian"),
        InputError,
        ("torch.int64",),
    ),
    "values that would broadcast": (
        lambda m: lw.fisher(m, (_x(), torch.ones(N, 1)), "gaussian"),
        InputError,
        (f"({N}, 1)", f"({N}, {C})"),
    ),
    "probabilities above one": (lambda m: lw.fisher(m, (_x(), 2 * torch.ones(N, C)), "bernoulli"), InputError, ("[0",)),
    "a mask of another shape": (
        lambda m: lw.fisher(m, (_x(), _y(), torch.ones(N + 1, dtype=torch.bool))),
        InputError,
        (f"({N + 1},)",),
    ),
    "an index in the place of a mask": (
        lambda m: lw.fisher(m, [(_x(), _y(), torch.arange(N))]),
        InputError,
        ("0 or 1", "(x, y) alone"),
    ),
    "class weights of another length": (
        lambda m: lw.fisher(m, (_x(), _y()), weight=torch.ones(C + 1)),
        InputError,
        (f"({C + 1},)", f"({C},)"),
    ),
    "a negative class weight": (
        lambda m: lw.fisher(m, (_x(), _y()), weight=torch.tensor([1.0, -1.0, 1.0])),
        InputError,
        ("negative",),
    ),
    "nothing that counts": (
        lambda m: lw.fisher(m, (_x(), torch.full((N,), -100)), normalize="terms", structure="diag"),
        InputError,
        ("no position counts",),
    ),
    # --- names ---
    "an unknown structure": (
        lambda m: lw.fisher(m, (_x(), _y()), structure="kfca"),
        NameLookupError,
        ("Did you mean 'kfac'",),
    ),
    "a structure of the wrong matrix": (
        lambda m: lw.hessian(m, (_x(), _y()), loss=F.cross_entropy, structure="kfac"),
        InputError,
        ("dense, block, diag, implicit",),
    ),
    "a centered structure that is not": (
        lambda m: lw.gradient_moment(m, (_x(), _y()), F.cross_entropy, "kfac", centered=True),
        InputError,
        ("lowrank",),
    ),
    "an unknown estimator": (
        lambda m: lw.fisher(m, (_x(), _y()), estimator="exakt"),
        InputError,
        ("'exakt'", "Did you mean 'exact'"),
    ),
    "an empirical GGN": (lambda m: lw.ggn(m, (_x(), _y()), estimator="empirical"), InputError, ("GGN",)),
    "an unknown likelihood": (
        lambda m: lw.fisher(m, (_x(), _y()), "catgorical"),
        NameLookupError,
        ("Did you mean 'categorical'",),
    ),
    "an unknown option": (
        lambda m: lw.fisher(m, (_x(), _y()), weigth=torch.ones(C)),
        InputError,
        ("Did you mean 'weight'",),
    ),
    "an option of another likelihood": (
        lambda m: lw.fisher(m, (_x(), _x()), "gaussian", ignore_index=0),
        InputError,
        ("'ignore_index'", "variance"),
    ),
    "an object and an option": (
        lambda m: lw.fisher(m, (_x(), _y()), lw.likelihoods.Categorical(), ignore_index=0),
        InputError,
        ("ignore_index",),
    ),
    "sharing that does not exist": (lambda m: lw.fisher(m, (_x(), _y()), sharing="some"), InputError, ("sharing",)),
    "conv that does not exist": (lambda m: lw.fisher(m, (_x(), _y()), conv="kfk"), InputError, ("conv",)),
    "a split that does not exist": (lambda m: lw.fisher(m, (_x(), _y()), damping_split="pi"), InputError, ("'pi'",)),
    "a normalization that is none": (lambda m: lw.fisher(m, (_x(), _y()), normalize="mean"), InputError, ("'mean'",)),
    "a fallback that is none": (
        lambda m: lw.fisher(m, (_x(), _y()), on_unsupported="ignore"),
        InputError,
        ("'ignore'",),
    ),
    "an unsupported parameter": (
        lambda m: lw.fisher(m, (_x(), _y()), on_unsupported="raise"),
        UnsupportedError,
        ("scale",),
    ),
    "a layer that does not exist": (
        lambda m: lw.fisher(m, (_x(), _y()), select="haed"),
        NameLookupError,
        ("'haed'", "Did you mean 'head'"),
    ),
    "no layer": (lambda m: lw.fisher(m, (_x(), _y()), select=[]), InputError, ("select",)),
    "a mixture that leaves a layer out": (
        lambda m: lw.fisher(m, (_x(), _y()), structure={"head": "kfac"}),
        InputError,
        ('{"*": "diag"}',),
    ),
    "a mixture for a layer that does not exist": (
        lambda m: lw.fisher(m, (_x(), _y()), structure={"haed": "kfac", "*": "diag"}),
        NameLookupError,
        ("Did you mean 'head'",),
    ),
    "a whole matrix inside a mixture": (
        lambda m: lw.fisher(m, (_x(), _y()), structure={"*": "dense"}),
        InputError,
        ('structure="dense" alone',),
    ),
    # --- numbers and functions ---
    "no samples": (lambda m: lw.fisher(m, (_x(), _y()), samples=0), InputError, ("samples=0",)),
    "negative memory": (lambda m: lw.fisher(m, (_x(), _y()), memory=-1), InputError, ("memory=-1",)),
    "memory NaN": (lambda m: lw.fisher(m, (_x(), _y()), memory=float("nan")), InputError, ("memory=nan",)),
    "smoothing above one": (lambda m: lw.fisher(m, (_x(), _y()), label_smoothing=2.0), InputError, ("2.0",)),
    "an axis that is not": (lambda m: lw.fisher(m, (_x(), _y()), example_axis=7), InputError, ("axis",)),
    "no loss": (lambda m: lw.hessian(m, (_x(), _y())), InputError, ("no loss",)),
    "two losses": (
        lambda m: lw.hessian(m, (_x(), _y()), loss=F.cross_entropy, likelihood="categorical"),
        InputError,
        ("a loss and a likelihood",),
    ),
    "a loss that is no function": (lambda m: lw.hessian(m, (_x(), _y()), loss=3), InputError, ("loss=3",)),
    "a loss with options": (
        lambda m: lw.hessian(m, (_x(), _y()), loss=F.cross_entropy, weight=torch.ones(C)),
        InputError,
        ("weight",),
    ),
    "a loss that is not reduced": (
        lambda m: lw.hessian(m, (_x(), _y()), loss=nn.CrossEntropyLoss(reduction="none"), structure="diag"),
        InputError,
        ("a loss of shape",),
    ),
    "a loss that is not reduced, moment": (
        lambda m: lw.gradient_moment(m, (_x(), _x()), loss=nn.MSELoss(reduction="none")),
        InputError,
        ("a loss of shape",),
    ),
    "terms and centered": (
        lambda m: lw.gradient_moment(m, (_x(), _y()), F.cross_entropy, centered=True, normalize="terms"),
        InputError,
        ("centered",),
    ),
    "a dense matrix that does not fit": (
        lambda m: lw.fisher(m, (_x(), _y()), structure="dense", memory=10_000),
        MemoryBudgetError,
        ("KiB", '"kfac"', "memory="),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_calls(name: str, untyped: None):
    build, error, words = CALLS[name]
    model = _model()
    with _refused(model, error, *words):
        build(model)


# --- models ------------------------------------------------------------------------------------------------


class _Function(nn.Module):
    """A linear layer, then a function of its output."""

    def __init__(self, after: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.after = nn.Linear(D, C), after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.net(x))


class _Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], type[LayerwiseError], tuple[str, ...]]] = {
    "batch norm in train mode": (
        lambda: nn.Sequential(nn.Linear(D, C), nn.BatchNorm1d(C)).train(),
        InteractionError,
        ("'1'", "model.eval()"),
    ),
    "batch norm without statistics": (
        lambda: nn.Sequential(nn.Linear(D, C), nn.BatchNorm1d(C, track_running_stats=False)).eval(),
        InteractionError,
        ("'1'",),
    ),
    "examples that interact": (lambda: _Function(lambda f: f - f.mean(0)), InteractionError, ("interact",)),
    "examples that interact in the input": (
        lambda: nn.Sequential(_Function(lambda f: f), nn.Softmax(dim=0), nn.Linear(C, C)),
        InteractionError,
        ("interact",),
    ),
    "examples that interact out of autograd's sight": (
        lambda: _Function(lambda f: f / f.detach().std(0)),
        InteractionError,
        ("interact",),
    ),
    "a frozen model": (lambda: nn.Linear(D, C).requires_grad_(False), InputError, ("trainable",)),
    "a model without parameters": (lambda: nn.Flatten(), InputError, ("trainable",)),
    "a detached output": (lambda: _Function(lambda f: f.detach()), InputError, ("no trainable parameter",)),
    "an output that is no tensor": (lambda: _Function(lambda f: "f"), InputError, ("returns str",)),
    "an output that is not finite": (lambda: _Function(lambda f: f / 0), InputError, ("output is NaN or infinite",)),
    "a gradient that is not finite": (
        lambda: _Function(lambda f: (f - f.detach()).abs().sqrt() + f),
        NumericalError,
        ("layer 'net", "not finite"),
    ),
    "a model on the meta device": (lambda: nn.Linear(D, C, device="meta"), InputError, ("meta", "no values")),
    "a lazy model": (lambda: nn.Sequential(nn.LazyLinear(C)), InputError, ("'0.weight'", "lazy")),
    "complex parameters": (
        lambda: _Complex(),
        UnsupportedError,
        ("torch.complex64",),
    ),
    "a reentrant checkpoint": (_Reentrant, UnsupportedError, ("use_reentrant=False",)),
}


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.turn = nn.Linear(D, C), nn.Parameter(torch.ones(C, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.net(x) * self.turn).real


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("structure", ["kfac", "dense", "diag"])
@pytest.mark.parametrize("name", MODELS)
def test_bad_models(name: str, structure: str):
    make, error, words = MODELS[name]
    model = make()
    words = tuple(word for word in words if structure != "dense" or "layer" not in word)
    with _refused(model, error, *words):
        lw.fisher(model, (_x(), _y()), structure=structure, estimator="empirical")


def test_a_reentrant_checkpoint_is_refused_by_the_hessian_too():
    model = _Reentrant()
    with _refused(model, UnsupportedError, "use_reentrant=False"):
        lw.hessian(model, (_x(), _y()), loss=F.cross_entropy, structure="dense")


def test_an_error_of_the_model_itself_passes_through_and_leaves_it_alone():
    model = _Function(lambda f: f @ torch.ones(7, 7))
    with _unchanged(model), pytest.raises(RuntimeError, match="mat1 and mat2"):
        lw.fisher(model, (_x(), _y()))


def test_an_interrupted_loader_leaves_the_model_alone():
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield _x(), _y()
        raise KeyboardInterrupt

    model = _model()
    with _unchanged(model), pytest.raises(KeyboardInterrupt):
        lw.fisher(model, batches(), structure="kfac")


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diag", "dense", "lowrank", "implicit"])
def test_a_good_call_leaves_the_model_alone_too(structure: str):
    model = _model()
    with _unchanged(model):
        matrix = lw.fisher(model, (_x(), _y()), structure=structure)
        matrix @ lw.ParamVector.zeros(model)


def test_state_that_a_forward_replaces_is_put_back():
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.state, self.calls = nn.Linear(D, C), None, 0
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen = self.seen + 1  # another tensor under the name
            self.state = self.net(x)
            return self.state

    model = Stateful()
    with _unchanged(model):
        lw.fisher(model, (_x(), _y()), structure="ekfac")
        lw.hessian(model, (_x(), _y()), loss=F.cross_entropy, structure="dense")


def test_weights_that_a_forward_rescales_are_put_back():
    model = nn.Sequential(nn.Embedding(7, 4, max_norm=0.1), nn.Flatten(), nn.Linear(8, C))
    batch = torch.randint(7, (N, 2)), _y()
    with _unchanged(model):
        lw.fisher(model, batch, structure="diag")


# --- vectors and damping -----------------------------------------------------------------------------------

DAMPED = ("kfac", "ekfac", "diag", "block", "quasidiag", "dense", "lowrank", "implicit")


@pytest.mark.parametrize("structure", DAMPED)
@pytest.mark.parametrize("damping", [-1e-3, float("nan"), float("inf"), -float("inf")])
def test_damping_must_be_a_number_of_at_least_zero(structure: str, damping: float):
    model = _linear()
    matrix = lw.fisher(model, (_x(), _y()), structure=structure)
    v = lw.ParamVector.randn(model, 0)
    for ask in (
        lambda: matrix.solve(v, damping=damping),
        lambda: matrix.power(v, -0.5, damping=damping),
        lambda: matrix.logdet(damping=damping),
        lambda: matrix.sample(1, damping=damping),
    ):
        with _refused(model, InputError, f"damping={damping}"):
            ask()


@pytest.mark.parametrize("structure", DAMPED)
def test_damping_is_asked_for_where_it_is_needed(structure: str):
    """One example with an input that is zero, one sample: every structure is singular."""
    model = _linear()
    matrix = lw.fisher(model, (_x(1) * torch.tensor([0.0, 1.0, 1.0]), _y(1)), structure=structure)
    v = lw.ParamVector.randn(model, 0)
    for ask in (lambda: matrix.solve(v), lambda: matrix.logdet(), lambda: matrix.sample(1)):
        with _refused(model, NumericalError, "damping"):
            ask()
    assert matrix.solve(v, damping=1e-2).norm() > 0


def test_a_hessian_that_is_not_definite_asks_for_damping():
    model = _linear()
    matrix = lw.hessian(model, (_x(), _y()), loss=F.cross_entropy, structure="dense")
    with _refused(model, NumericalError, "damping >"):
        matrix.solve(lw.ParamVector.randn(model, 0))


def test_vectors_of_other_parameters():
    model = _linear()
    matrix = lw.fisher(model, (_x(), _y()))
    v = lw.ParamVector.randn(model, 0).dict()
    with _refused(model, InputError, "0.bias", "restrict"):
        matrix @ {k: t for k, t in v.items() if k != "0.bias"}
    with _refused(model, InputError, "spare"):
        matrix @ {**v, "spare": torch.ones(2)}
    with _refused(model, InputError, "'0.weight'", "shape (4, 3)"):
        matrix @ {**v, "0.weight": torch.ones(3, 4)}
    with _refused(model, InputError, "(7,)"):
        matrix @ torch.ones(7)
    with _refused(model, InputError, "a list"):
        matrix @ [1.0, 2.0]


def test_numbers_of_results():
    matrix = lw.fisher(_linear(), (_x(), _y()), structure="dense")
    for ask in (
        lambda: matrix.eigh(k=0),
        lambda: matrix.eigenvalues(k=1000),
        lambda: matrix.sample(0, damping=1.0),
        lambda: matrix.to(dtype=torch.int32),
    ):
        with pytest.raises(InputError, match=THREE):
            ask()


def test_layers_that_a_matrix_does_not_have():
    for structure in ("kfac", "dense", "lowrank", "implicit"):
        matrix = lw.fisher(_linear(), (_x(), _y()), structure=structure)
        with pytest.raises(NameLookupError, match=r"Unknown layer '5'\. Available: 0, 2\.$"):
            matrix.layer("5")


def test_sums_and_merges_of_matrices_that_differ():
    model, batch = _linear(), (_x(), _y())
    all_layers = lw.fisher(model, batch)
    one_layer = lw.fisher(model, batch, select="2")
    with _refused(model, InputError, "0.bias", "same parameters"):
        all_layers + one_layer
    with _refused(model, InputError, "0.bias", "same parameters"):
        all_layers.merge(one_layer)
    with _refused(model, InputError, "'diag'", "'kfac'"):
        all_layers.merge(lw.fisher(model, batch, structure="diag"))
    dense, small = (lw.fisher(model, batch, structure="dense", select=s) for s in ("*", "2"))
    with _refused(model, InputError, "same parameters"):
        dense.merge(small)
    for structure in ("dense", "block", "lowrank"):
        moment = lw.gradient_moment(model, batch, F.cross_entropy, structure, centered=True)
        with _refused(model, InputError, "centered"):
            moment.merge(moment)


# --- files -------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "F.safetensors"
    lw.fisher(_linear(), (_x(), _y())).save(path)
    return path


def _refuses_to_load(path: Path, *words: str) -> None:
    with pytest.raises(FileFormatError) as caught:
        lw.load(path)
    assert re.search(THREE, str(caught.value))
    for word in (str(path), *words):
        assert word in str(caught.value)


def test_files_that_are_not_ours(tmp_path: Path):
    _refuses_to_load(tmp_path / "none.safetensors", "does not exist")
    _refuses_to_load(tmp_path, "cannot be read")
    for name, content in {
        "empty": b"",
        "text": b"not a matrix",
        "random": bytes(range(256)) * 8,
        "huge header": b"\xff" * 64,
    }.items():
        path = tmp_path / name
        path.write_bytes(content)
        _refuses_to_load(path, "cannot be read")
    foreign = tmp_path / "weights.safetensors"
    save_file({"w": torch.ones(2)}, foreign)
    _refuses_to_load(foreign, "something else")
    save_file({"w": torch.ones(2)}, foreign, metadata={"format": "pt"})
    _refuses_to_load(foreign, "something else")


def test_files_that_are_cut_short(saved: Path):
    content = saved.read_bytes()
    for length in (0, 4, 8, 100, len(content) // 2, len(content) - 1):
        saved.write_bytes(content[:length])
        _refuses_to_load(saved)


def _description(path: Path) -> dict[str, Any]:
    header = path.read_bytes()
    size = int.from_bytes(header[:8], "little")
    return json.loads(json.loads(header[8 : 8 + size])["__metadata__"]["description"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: {**d, "version": 99}, ("version 99", "version 1")),
        (lambda d: {k: v for k, v in d.items() if k != "shapes"}, ("shapes",)),
        (lambda d: {**d, "layers": [{**d["layers"][0], "operator": "magic"}]}, ("magic",)),
        (lambda d: {**d, "layers": 3}, ()),
        (lambda d: [1, 2], ()),
    ],
)
def test_files_of_another_version_or_with_another_description(saved: Path, change: Callable, words: tuple[str, ...]):
    changed = json.dumps(change(_description(saved)))
    save_file(load_file(saved), saved, metadata={"format": "layerwise-matrix", "description": changed})
    _refuses_to_load(saved, *words)


def test_a_tensor_that_is_missing(saved: Path):
    tensors, description = load_file(saved), json.dumps(_description(saved))
    tensors.popitem()
    save_file(tensors, saved, metadata={"format": "layerwise-matrix", "description": description})
    _refuses_to_load(saved)


def test_a_save_that_fails_loses_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch):
    before = saved.read_bytes()

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("layerwise.curvature.description.save_file", full)
    model = _linear()
    with _refused(model, FileFormatError, "No space left", str(saved)):
        lw.fisher(model, (_x(), _y())).save(saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_a_path_that_cannot_be_written(tmp_path: Path):
    model = _linear()
    matrix = lw.fisher(model, (_x(), _y()))
    with _refused(model, FileFormatError, "cannot be written"):
        matrix.save(tmp_path / "no folder" / "F.safetensors")
    with _refused(model, FileFormatError, "cannot be written"):
        matrix.save(tmp_path)
    assert not list(tmp_path.parent.glob("*.partial"))


def test_matrices_that_keep_nothing_cannot_be_saved(tmp_path: Path):
    model = _linear()
    with _refused(model, UnsupportedError, "implicit"):
        lw.fisher(model, (_x(), _y()), structure="implicit").save(tmp_path / "F")
    assert not list(tmp_path.iterdir())


# --- layers, vectors ---------------------------------------------------------------------------------------


def test_lw_layers_refuses_with_the_same_words(untyped: None):
    model = _model()
    with _refused(model, NameLookupError, "Did you mean 'head'"):
        lw.layers(model, select="haed")
    with _refused(model, InputError, "on_unsupported"):
        lw.layers(model, on_unsupported="maybe")
    with _refused(model, UnsupportedError, "scale"):
        lw.layers(model, on_unsupported="raise")


def test_vectors_refuse_names_and_shapes():
    model = _linear()
    v = lw.ParamVector.randn(model, 0)
    other = lw.ParamVector({"2.weight": torch.ones(2)})
    with _refused(model, NameLookupError, "'0.wight'", "Did you mean '0.weight'"):
        v["0.wight"]
    with _refused(model, NameLookupError, "'spare'"):
        lw.ParamVector({"spare": torch.ones(2)}).add_to(model)
    with _refused(model, InputError):
        lw.ParamVector.from_flat(torch.ones(3), model)
    with _refused(model, LayerwiseError):
        v + other
    with _refused(model, LayerwiseError):
        v @ other


def test_the_hessian_refuses_batch_norm_in_train_mode():
    model = nn.Sequential(nn.Linear(D, C), nn.BatchNorm1d(C)).train()
    batch = torch.randn(N, D), torch.randint(C, (N,))
    with pytest.raises(LayerwiseError, match=r"Got .*BatchNorm1d.*\. Expected .*\. Call .*eval"):
        lw.hessian(model, batch, loss=nn.functional.cross_entropy, structure="dense")
    assert int(model[1].num_batches_tracked) == 0
