"""`outputs=`: which functions of the model's output a kernel is about."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_tools import close, features, gaussian, mlp, refused, unchanged
from torch import Tensor

import layerwise as lw
from layerwise.foundations.errors import InputError, InteractionError, LayerwiseError
from layerwise.testing import case, oracles

MODEL, X = mlp(3, 4, 4), gaussian(5, 3)


def _rows(model: Any, x: Any) -> Tensor:
    """[N, *out, d]."""
    return oracles.jacobian(model, x)


CHOICES: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "sum": ("sum", lambda J: J.flatten(1, -2).sum(1, keepdim=True)),
    "index": (2, lambda J: J[..., 2, :]),
    "negative index": (-1, lambda J: J[..., -1, :]),
    "list": ([0, 2], lambda J: J[..., [0, 2], :]),
    "tuple": ((2, -3), lambda J: J[..., [2, -3], :]),
    "one twice": ([1, 1], lambda J: J[..., [1, 1], :]),
    "function": (lambda f: f[..., 2] - f[..., 0], lambda J: J[..., 2, :] - J[..., 0, :]),
    "all": ("all", lambda J: J),
}


def _check(name: str, model: Any, x: Any) -> None:
    outputs, of_rows = CHOICES[name]
    chosen = of_rows(_rows(model, x))
    J = chosen.reshape(-1, chosen.shape[-1])
    K = lw.ntk(model, x, outputs=outputs)
    close(K.diag(), (J @ J.mT).diagonal())
    close(K @ gaussian(len(J)), J @ J.mT @ gaussian(len(J)))
    close(K.matrix(), J @ J.mT)
    close(lw.jacobian(model, x, outputs).to_dense(), J)
    half = len(J) // len(x)
    close(lw.ntk(model, x[:1], x[1:], outputs).matrix(), (J @ J.mT)[:half, half:])
    assert K.n * K.functions == len(J)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.usefixtures("untyped")
def test_functions_of_a_vector(name: str):
    _check(name, MODEL, X)


def test_functions_with_annotations_checked():
    _check("function", MODEL, X)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("of", ["sequence_linear", "lstm"])
@pytest.mark.usefixtures("untyped")
def test_functions_of_a_sequence(name: str, of: str):
    model, x, _ = case(of).make()
    _check(name, model, x)


def test_outputs_that_merge_examples_and_positions_come_apart():
    """[N·T, C] from the model, [N, T, C] for the function."""
    model, x, _ = case("flattened_outputs").make()
    seen = []

    def last(f: Tensor) -> Tensor:
        seen.append(f.shape[1:])
        return f[:, -1]

    J = _rows(model, x).unflatten(0, (3, 5))[:, -1].flatten(0, 1)
    close(lw.ntk(model, x, outputs=last).matrix(), J @ J.mT)
    assert set(seen) == {(5, 3)}


def test_a_function_may_be_nonlinear():
    log_p = lambda f: f.log_softmax(-1)[:, 1]  # noqa: E731
    f, J = oracles.outputs(MODEL, X), _rows(MODEL, X)
    p = f.softmax(-1)
    own = J[:, 1] - torch.einsum("nc,ncd->nd", p, J)
    close(lw.ntk(MODEL, X, outputs=log_p).matrix(), own @ own.mT)
    close(lw.jacobian(MODEL, X, log_p).to_dense(), own)
    close(lw.jacobian(MODEL, X, log_p) @ gaussian(own.shape[1]), own @ gaussian(own.shape[1]))


def test_a_function_may_have_a_shape_of_its_own():
    pairs = lambda f: f.unsqueeze(1) - f.unsqueeze(2)  # noqa: E731
    K = lw.ntk(MODEL, X, outputs=pairs)
    J = _rows(MODEL, X)
    own = (J.unsqueeze(1) - J.unsqueeze(2)).flatten(0, 2)
    assert K.out_shape == (4, 4)
    close(K.matrix(), own @ own.mT)
    assert (K @ gaussian(5, 4, 4)).shape == (5, 4, 4)


def test_shapes_of_the_functions():
    assert lw.ntk(MODEL, X, outputs="sum").out_shape == ()
    assert lw.ntk(MODEL, X, outputs=1).out_shape == ()
    assert lw.ntk(MODEL, X, outputs=[1]).out_shape == (1,)
    assert lw.ntk(MODEL, X, outputs=1).shape == (5, 5)


def test_a_model_of_one_number_an_example():
    model, x, _ = case("squeezed_output").make()
    J = features(model, x)
    for outputs in ("all", "sum", lambda f: 2 * f):
        scale = 4 if callable(outputs) else 1
        close(lw.ntk(model, x, outputs=outputs).matrix(), scale * J @ J.mT)
    with refused(InputError, "outputs=0", "shape ()"):
        lw.ntk(model, x, outputs=0)


@pytest.mark.parametrize("outputs", ["mean", 1.5, ["a"], [0.5], None, object(), True, [True, False, True, False]])
@pytest.mark.usefixtures("untyped")
def test_what_is_no_choice(outputs: Any):
    for make in (lw.ntk, lw.jacobian):
        with unchanged(MODEL), refused(InputError, "outputs=", "a list of indices"):
            make(MODEL, X, outputs=outputs)


@pytest.mark.parametrize("outputs", [4, -5, [0, 4], []])
def test_indices_that_the_output_does_not_have(outputs: Any):
    with unchanged(MODEL), refused(InputError, f"outputs={outputs!r}", "shape (4,)", "from -4 to 3"):
        lw.ntk(MODEL, X, outputs=outputs)


@pytest.mark.parametrize(
    "outputs",
    [
        lambda f: f.sum(),
        lambda f: f.sum(0),
        lambda f: f[:2].flatten(),
        lambda f: 3,
        lambda f: f.argmax(1),
        lambda f: torch.ones(len(f)),
    ],
    ids=["number", "without examples", "fewer rows", "no tensor", "integers", "a constant"],
)
@pytest.mark.usefixtures("untyped")
def test_functions_that_do_not_keep_the_examples(outputs: Callable):
    for make in (lw.ntk, lw.jacobian):
        with unchanged(MODEL), refused(LayerwiseError, "outputs= a function that"):
            _use(make(MODEL, X, outputs=outputs))


def _use(made: lw.Kernel | lw.Jacobian) -> Tensor:
    return made.matrix() if isinstance(made, lw.Kernel) else made.to_dense()


@pytest.mark.parametrize(
    "outputs",
    [lambda f: f - f.mean(0), lambda f: f.softmax(0), lambda f: f.flip(0), lambda f: f.cumsum(0)],
    ids=["mean", "softmax", "order", "sum of those before"],
)
def test_functions_that_mix_examples(outputs: Callable):
    for make in (lw.ntk, lw.jacobian):
        with unchanged(MODEL), refused(InteractionError, "mixes examples", "axes 1, 2"):
            make(MODEL, X, outputs=outputs)
