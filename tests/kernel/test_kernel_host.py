"""What a kernel asks of the host: operations that do not grow with the outputs, few looks, one look at a model."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_tools import close, gaussian, refused
from torch import Tensor, nn

import layerwise as lw
from counting import Operations
from layerwise.foundations.errors import InputError
from layerwise.kernel.contraction import ORDERS, _by_place, _by_token, rows
from layerwise.kernel.cost import LayerSizes, cost
from layerwise.kernel.plan import with_positions
from layerwise.layers.capture.copies import Copies
from layerwise.layers.capture.model_call import substituted
from layerwise.layers.capture.vectorised import batched_grad
from layerwise.layers.io.one_hot import OneHot
from layerwise.layers.io.standard import Standard
from layerwise.testing import oracles

pytestmark = pytest.mark.usefixtures("untyped")
LOOKS = ("_local_scalar_dense", "nonzero", "_unique2", "is_nonzero")
"""Operations that wait for a GPU."""


def _operations(model: nn.Module, x: Tensor, **options: Any) -> Counter[str]:
    lw.ntk(model, x, **options).matrix()  # once, to look at the model
    with Operations() as operations:
        lw.ntk(model, x, **options).matrix()
    return operations.seen


def _network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    body = (nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.GELU(), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LayerNorm(16))
    return nn.Sequential(*body, nn.Linear(16, outputs)).double().eval()


def test_all_outputs_are_pulled_back_together():
    few, many = (_operations(_network(P), gaussian(5, 2, 6, 6)) for P in (2, 7))
    pulled = [name for name in few | many if name.endswith("_backward")]
    assert {"convolution_backward", "native_batch_norm_backward", "native_layer_norm_backward"} <= set(pulled)
    assert {name: few[name] for name in pulled} == {name: many[name] for name in pulled}


class Last(nn.Module):
    """The output at one position, by default the last."""

    def __init__(self, layers: int = 2, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3 if i == 0 else width, width) for i in range(layers))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = layer(h).tanh()
        chosen = x[..., 0].argmax(1)
        return self.head(h[torch.arange(len(x), device=x.device), chosen])


def _sequences(n: int, positions: list[int], length: int = 12) -> Tensor:
    """With the largest entry at one of these positions each."""
    x = gaussian(n, length, 3).clamp(-2, 2)
    for i in range(n):
        x[i, positions[i % len(positions)], 0] = 9.0
    return x


def test_looks_do_not_grow_with_layers_and_tiles():
    x, found = _sequences(40, [11]), []
    for layers in (1, 4):
        torch.manual_seed(0)
        model = Last(layers).double()
        plan = lw.ntk(model, x).plan()
        assert all(layer.sizes.sparse for layer in plan.layers[:-1])
        assert plan.layers[0].cost.tile < 40
        seen = _operations(model, x)
        found.append(sum(seen[name] for name in LOOKS))
    assert found[0] == found[1] <= 2


@pytest.mark.parametrize("order", list(ORDERS))
@pytest.mark.parametrize("positions", [[4], [2, 9], [0, 1, 3, 5, 7, 9, 11], [5, 6]])
def test_more_positions_than_the_first_examples_have(order: str, positions: list[int]):
    torch.manual_seed(0)
    model, x = Last().double(), _sequences(7, [3])
    expected = lw.ntk(model, x[:2]).plan()  # what is known from now on
    assert expected.layers[0].sizes.positions == 1
    x = torch.cat([x[:3], _sequences(6, positions)])
    K = lw.ntk(model, x, algorithm=order)
    assert K.plan().layers[0].sizes.positions == 1
    close(K.matrix(), oracles.ntk(model, x))
    y = _sequences(4, positions)
    close(lw.ntk(model, x, y, algorithm=order).matrix(), oracles.jacobian(model, x).flatten(0, -2) @ _rows(model, y).mT)


def _rows(model: nn.Module, x: Tensor) -> Tensor:
    return oracles.jacobian(model, x).flatten(0, -2)


def test_an_order_is_chosen_again_where_more_positions_are_live():
    model = Last(width=64).double()
    K = lw.ntk(model, _sequences(40, [3], length=64), memory=3_000_000)
    request, layer = K.plan().request, K.plan().layers[1]
    assert (layer.sizes.positions, layer.order) == (1, "gram")
    assert with_positions(layer, 1, request) is layer
    again = with_positions(layer, 64, request)
    assert again.sizes.positions == 64
    assert not again.keeps_rows
    assert again.cost.scratch * 8 <= (request.memory - request.matrix_bytes) / 8


# --- one look at a model ------------------------------------------------------------------------------------


def _runs(model: nn.Module, call: Any) -> int:
    seen: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: seen.append(1))
    call()
    first = len(seen)
    call()
    handle.remove()
    return len(seen) - first


def test_a_model_that_was_looked_at_is_not_run_until_the_matrix_is_asked_for():
    torch.manual_seed(0)
    model, x = Last().double(), _sequences(5, [3])
    assert _runs(model, lambda: lw.ntk(model, x)) == 0
    assert _runs(model, lambda: lw.ntk(model, x, outputs=[0])) == 0
    assert _runs(model, lambda: lw.ntk(model, x, outputs=lambda f: f[:, 0])) == 1  # a new one under an old name


def test_another_kind_of_batch_is_looked_at_anew():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    for x in (gaussian(4, 3), gaussian(4, 5, 3), gaussian(4, 6, 3)):
        K = lw.ntk(model, x)
        assert K.out_shape == (*x.shape[1:-1], 2)
        assert K.plan().layers[0].sizes.positions == x[0, ..., 0].numel()
        close(K.matrix(), oracles.ntk(model, x))
    assert lw.ntk(model, gaussian(4, 3), outputs=1).out_shape == ()
    with torch.autocast("cpu", torch.bfloat16):
        half = lw.ntk(model.float(), gaussian(4, 3).float()).plan().request.gradient_bytes
    assert half < lw.ntk(model, gaussian(4, 3).float()).plan().request.gradient_bytes


def test_inputs_that_are_written_to_are_checked_again():
    model, x = nn.Linear(3, 2).double(), gaussian(4, 3)
    K = lw.ntk(model, x)
    x[1, 1] = float("nan")
    with refused(InputError, "NaN or infinite", "inputs"):
        K.matrix()


# --- orders and tiles ---------------------------------------------------------------------------------------


def test_a_small_square_is_one_tile_where_starting_one_is_dear():
    sizes, n = LayerSizes(1, 1, 512, 513, 10, raw=1), 256
    pairs = n * (n + 1) / 2
    tiles = [cost("gram", sizes, n, n, pairs, 10**9, 32.0, False, start).tile for start in (0.0, 4e9)]
    assert tiles == [64, 256]
    long = LayerSizes(64, 1, 256, 2305, 10, raw=1)
    assert cost("chain", long, 100, 100, 5050, 10**9, 32.0, False, 4e9).tile < 50


def test_tokens_may_have_any_numbers():
    torch.manual_seed(0)
    index, g = torch.tensor([[3, -1, 900], [900, 900, 17]]), torch.randn(2, 2, 3, 1, 4, dtype=torch.float64)
    kernels = []
    for numbering in (_by_token, _by_place):
        numbers, size = numbering(index.flatten())
        side = Standard(OneHot(numbers.view(2, 3), size), g)
        R = side.per_example_grads().flatten(2).transpose(0, 1).flatten(0, 1)
        kernels.append(R @ R.mT)
    close(kernels[1], kernels[0], 1e-14)
    whole = Standard(OneHot(index, 1000), g)
    close(rows(whole, whole).flatten(2).flatten(0, 1), kernels[0], 1e-14)
    assert _by_token(index.flatten())[1] == 3


class Chosen(nn.Module):
    """As many outputs as a setting says that nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.settings = nn.Linear(4, 6), {"outputs": 3}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, : self.settings["outputs"]]


def test_a_head_of_another_size_is_looked_at_again():
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(4, 4)
    assert lw.ntk(model, x).matrix().shape == (12, 12)
    model[2].weight.data, model[2].bias.data = torch.randn(5, 6), torch.randn(5)
    assert lw.ntk(model, x).matrix().shape == (20, 20)


@pytest.mark.parametrize("ask", [lambda K: K.matrix(), lambda K: K.diag()])
def test_outputs_that_are_others_than_when_looked_at(ask: Callable[[Any], Tensor]):
    model, x = Chosen(), torch.randn(4, 4)
    ask(lw.ntk(model, x))
    model.settings["outputs"] = 5
    with pytest.raises(InputError, match="gives 5 outputs for an example, where it gave 3"):
        ask(lw.ntk(model, x))
    assert ask(lw.ntk(model, x)).shape[0] == 20


def test_a_layer_that_some_batches_leave_out():
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.middle(h) if x[0, 0] > 0 else h

    torch.manual_seed(0)
    model, a, b = Sometimes().double(), torch.rand(4, 3).double(), -torch.rand(4, 3).double()
    rows = []
    for x in (b, a):
        for y in model(x).flatten():
            grads = torch.autograd.grad(y, list(model.parameters()), retain_graph=True, allow_unused=True)
            zeros = [torch.zeros_like(p) for p in model.parameters()]
            rows.append(torch.cat([(z if g is None else g).flatten() for g, z in zip(grads, zeros, strict=True)]))
    J = torch.stack(rows)
    K = J @ J.mT
    for order in ("auto", *ORDERS):
        torch.testing.assert_close(lw.ntk(model, [b, a], algorithm=order).matrix(), K)
    torch.testing.assert_close(lw.ntk(model, [b, a], a, algorithm="gram").matrix(), K[:, 16:])
    torch.testing.assert_close(lw.ntk(model, a, [b, a], algorithm="gram").matrix(), K[16:])


@pytest.mark.parametrize("n", [1, 2])
def test_copies_of_a_bias(n: int):
    """torch takes another kernel for a bias of one example, which refuses further axes."""
    model, copies, x = nn.Linear(4, 6), Copies({"bias": 1}), torch.randn(n, 6, 4)
    made = copies.make(model, n)
    with substituted(model, made):
        f = model(x)
    torch.testing.assert_close(f, model(x))
    v = torch.randn(3, *f.shape)
    (grads,) = batched_grad(f, list(made.values()), v)
    assert grads is not None
    torch.testing.assert_close(copies.rows(grads, (6,)), v.sum(2))
