"""Record by use: products with a parameter are layers, whichever module or function makes them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise as lw
from layerwise.layers.capture.uses import ProductTracer, Use
from layerwise.layers.rules.products import readings

N, T, D = 5, 3, 4


class Apply(nn.Module):
    """Parameters and modules by name, and a function of them."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


class Conv1D(nn.Module):
    """As in Hugging Face's GPT-2: a linear layer that stores its weight the other way round."""

    def __init__(self, o: int, i: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(i, o))
        self.bias = nn.Parameter(torch.randn(o))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], -1)


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, Any], dict[str, tuple[int, int, int]]]] = {
    "linear": (lambda m, x: F.linear(x, m.w, m.b), {"w": (3, D), "b": (3,)}, {"w": (1, 3, D + 1)}),
    "matmul": (lambda m, x: x @ m.w, {"w": (D, 3)}, {"w": (1, 3, D)}),
    "transposed view": (lambda m, x: x @ m.w.t(), {"w": (3, D)}, {"w": (1, 3, D)}),
    "from the left": (lambda m, x: (m.w @ x.mT).mT, {"w": (3, D)}, {"w": (1, 3, D)}),
    "over positions": (lambda m, x: m.w @ x, {"w": (2, T)}, {"w": (1, 2, T)}),
    "einsum": (lambda m, x: torch.einsum("nti,oi->nto", x, m.w), {"w": (3, D)}, {"w": (1, 3, D)}),
    "einsum with dots": (lambda m, x: torch.einsum("...i,io->...o", x, m.w), {"w": (D, 3)}, {"w": (1, 3, D)}),
    "einsum, other order": (
        lambda m, x: torch.einsum("oi,nti->otn", m.w, x).permute(2, 1, 0),
        {"w": (3, D)},
        {"w": (1, 3, D)},
    ),
    "einsum of stacked": (lambda m, x: torch.einsum("nti,tio->nto", x, m.w), {"w": (T, D, 2)}, {"w": (T, 2, D)}),
    "bmm": (lambda m, x: torch.bmm(x.transpose(0, 1), m.w).transpose(0, 1), {"w": (T, D, 2)}, {"w": (T, 2, D)}),
    "stacked from the left": (lambda m, x: (m.w @ x.unsqueeze(-1)).squeeze(-1), {"w": (T, 2, D)}, {"w": (T, 2, D)}),
    "experts by number": (
        lambda m, x: sum(F.linear(x, m.w[k]) for k in range(3)),
        {"w": (3, 2, D)},
        {f"w[{k}]": (1, 2, D) for k in range(3)},
    ),
    "rows": (
        lambda m, x: F.linear(x, m.w[:2]) * F.linear(x, m.w[2:4]),
        {"w": (4, D)},
        {"w[0:2]": (1, 2, D), "w[2:4]": (1, 2, D)},
    ),
    "depthwise conv1d": (
        lambda m, x: F.conv1d(x, m.w.squeeze(1).unsqueeze(1), None, stride=2, padding=2, dilation=2, groups=T),
        {"w": (T, 1, 2)},
        {"w": (T, 1, 2)},
    ),
    "used twice": (lambda m, x: (x @ m.w).tanh() @ m.w, {"w": (D, D)}, {"w": (1, D, D)}),
    "low rank": (lambda m, x: x @ m.a @ m.b, {"a": (D, 2), "b": (2, 3)}, {"a": (1, 2, D), "b": (1, 3, 2)}),
    "bias in one use of two": (
        lambda m, x: F.linear(F.linear(x, m.w, m.b).tanh(), m.w),
        {"w": (D, D), "b": (D,)},
        {"w": (1, D, D), "b": (1, D, 1)},
    ),
}


def _model(name: str) -> tuple[Apply, dict[str, tuple[int, int, int]]]:
    forward, shapes, forms = CASES[name]
    torch.manual_seed(0)
    model = Apply(forward, **{k: torch.randn(*shape) for k, shape in shapes.items()}).double()
    return model, forms


def _truth(model: nn.Module, x: Tensor) -> Tensor:
    f = model(x).flatten()
    parameters = list(model.parameters())
    rows = [torch.autograd.grad(entry, parameters, retain_graph=True) for entry in f]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def _found(matrix: Any) -> dict[str, tuple[int, int, int]]:
    return {spec.name: spec.form.shape for spec in matrix.table.layers if spec.sites}


@pytest.mark.parametrize("name", CASES)
def test_a_product_is_a_layer_and_exact(name: str) -> None:
    model, forms = _model(name)
    x = torch.randn(N, T, D, dtype=torch.float64)
    J = lw.jacobian(model, x)
    torch.testing.assert_close(J.to_dense(), _truth(model, x), rtol=1e-10, atol=1e-12)
    assert {spec.name: spec.form.shape for spec in J.recorder.table.layers if spec.sites} == forms
    M = lw.fisher(model, (x, torch.zeros_like(model(x))), "gaussian", "dense", "exact")
    torch.testing.assert_close(M.to_dense(), _truth(model, x).T @ _truth(model, x) / N, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["linear", "matmul", "bmm", "experts by number", "rows", "bias in one use of two", "depthwise conv1d"]
)
def test_optimizers_take_its_statistics(name: str) -> None:
    model, forms = _model(name)
    x = torch.randn(N, T, D, dtype=torch.float64)
    opt = lw.optim.KFAC(model, lr=0.0, factor_decay=0.0, estimator="empirical")
    model(x).square().sum().backward()
    opt.step()
    kept = {layer: state for of in opt.state_dict()["state"].values() for layer, state in of.items()}
    matrices = [layer for layer, (_, _, i) in forms.items() if i > 1]
    assert all(bool(kept[layer]["Q"].any()) and bool(kept[layer]["P"].any()) for layer in matrices)


def test_huggingface_conv1d_has_the_factors_of_a_linear_layer() -> None:
    torch.manual_seed(0)
    conv, head = Conv1D(3, D), nn.Linear(3, 2)
    linear = nn.Linear(D, 3)
    linear.weight.data, linear.bias.data = conv.weight.data.T.clone(), conv.bias.data.clone()
    x, y = torch.randn(N, T, D), torch.randint(2, (N, T))
    found, known = (
        lw.fisher(nn.Sequential(first, nn.Tanh(), head), (x, y), "categorical", "kfac", "exact")
        for first in (conv, linear)
    )
    assert _found(found) == _found(known)
    one, other = found.operators["0"], known.operators["0"]
    torch.testing.assert_close(one.diagonal(), other.diagonal())
    torch.testing.assert_close(one.G, other.G)


def test_a_linear_layer_whose_weight_a_function_uses_too() -> None:
    torch.manual_seed(0)
    model = Apply(lambda m, x: F.linear(m.l(x).tanh(), m.l.weight), l=nn.Linear(D, D)).double()
    x = torch.randn(N, T, D, dtype=torch.float64)
    J = lw.jacobian(model, x)
    torch.testing.assert_close(J.to_dense(), _truth(model, x))
    assert {spec.name for spec in J.recorder.table.layers if spec.sites} == {"l", "l.bias"}


def test_a_use_that_is_not_a_product_sends_the_parameter_back() -> None:
    torch.manual_seed(0)
    model = Apply(lambda m, x: (x @ m.w) * m.w.sum(), w=torch.randn(D, D)).double()
    x = torch.randn(N, T, D, dtype=torch.float64)
    J = lw.jacobian(model, x)
    torch.testing.assert_close(J.to_dense(), _truth(model, x))
    assert not J.recorder.table.layers[0].sites


def test_a_later_batch_that_uses_it_otherwise() -> None:
    torch.manual_seed(0)
    model = Apply(lambda m, x: (x @ m.w) * (1 if x.shape[1] > 2 else m.w.sum()), w=torch.randn(D, D)).double()
    first, second = (torch.randn(N, t, D, dtype=torch.float64) for t in (3, 2))
    batches = [(x, torch.zeros_like(model(x))) for x in (first, second)]
    M = lw.fisher(model, batches, "gaussian", "block", "exact")
    J = torch.cat([_truth(model, first), _truth(model, second)])
    torch.testing.assert_close(M.to_dense(), J.T @ J / (2 * N))


def test_autocast_casts_once_and_both_uses_are_counted() -> None:
    torch.manual_seed(0)
    model = Apply(lambda m, x: m.l(x) + (F.linear(x, m.l.weight) * m.l.weight.sum()), l=nn.Linear(D, 2))
    x = torch.randn(N, D)
    with torch.autocast("cpu", torch.bfloat16):
        J = lw.jacobian(model, x).to_dense()
    torch.testing.assert_close(J, _truth(model, x), rtol=0.1, atol=0.1)


def test_watch_names_the_rows_and_the_order_of_a_view() -> None:
    model = Apply(lambda m, x: x, w=torch.randn(3, 4, 5))
    seen: list[Use] = []

    def note(use: Use, _: object, out: Tensor) -> Tensor:
        seen.append(use)
        return out

    with ProductTracer(model, note):
        torch.randn(2, 5) @ model.w[1].t()
        torch.randn(2, 4) @ model.w[2]
        torch.bmm(torch.randn(3, 2, 4), model.w)
        torch.randn(2, 2) @ model.w[0, :2]  # some columns of a matrix: not a layer
    assert seen == [Use("w", (1, 2), False), Use("w", (2, 3), True), Use("w", None, True)]


def test_no_reading_of_a_product_that_is_scaled() -> None:
    b, x, w = torch.ones(3), torch.ones(2, 4), torch.ones(4, 3)
    assert not list(readings(torch.addmm, (b, x, w), {"alpha": 2.0}))
    (halved, *_) = readings(torch.addmm, (b, x, w), {"beta": 0.5})
    assert halved.bias is None
