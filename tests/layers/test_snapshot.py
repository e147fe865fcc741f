"""Buffers are taken, compared and put back bit by bit, in a few operations however many there are."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import layerwise as lw
from counting import Operations
from layerwise.layers.capture.model_call import Snapshot, duplicates, undisturbed


def _tensors() -> list[Tensor]:
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1.0])
    wide = torch.arange(12.0, dtype=torch.float64).view(3, 4).mT
    few = (torch.tensor(True), torch.tensor([3], dtype=torch.int16), torch.tensor(7), torch.zeros(0))
    return [odd, *few, wide, torch.ones(2).bfloat16(), torch.tensor([1 + 2j])]


def _bits(t: Tensor) -> list[int]:
    return t.reshape(-1).view(torch.uint8).tolist()


def test_every_change_is_undone_and_nothing_else_is_written():
    tensors = _tensors()
    bits = [_bits(t) for t in tensors]
    for place in (0, 1, 3, 5, 6, 7):
        before, versions = Snapshot(tensors), [t._version for t in tensors]
        changed = tensors[place]
        changed.copy_(~changed if changed.dtype == torch.bool else changed + 1)
        assert _bits(changed) != bits[place]
        before.put_back()
        assert [_bits(t) for t in tensors] == bits
        assert [t._version - v for t, v in zip(tensors, versions, strict=True)] == [2 * (p == place) for p in range(8)]


def test_a_tensor_of_another_kind_now_is_filled_with_what_it_was():
    a, b = torch.ones(2), torch.full((3,), 5.0)
    before = Snapshot([a, b])
    a.data, b[0] = torch.zeros(2, dtype=torch.float64), 0.0
    before.put_back()
    assert a.tolist() == [1.0, 1.0]
    assert b.tolist() == [5.0, 5.0, 5.0]


def test_duplicates_have_memory_and_versions_of_their_own():
    tensors = _tensors()
    copies = duplicates(tensors)
    assert [_bits(t) for t in copies] == [_bits(t) for t in tensors]
    assert [(t.dtype, t.shape) for t in copies] == [(t.dtype, t.shape) for t in tensors]
    versions = [t._version for t in copies]
    copies[0].add_(1)
    assert [t._version for t in copies[1:]] == versions[1:]
    assert len({t.data_ptr() for t in [*tensors, *copies] if t.numel()}) == 2 * 7


def test_operations_do_not_grow_with_the_number_of_buffers():
    found = []
    for layers in (2, 6):
        model = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(layers))).eval()
        with Operations() as operations, undisturbed(model):
            pass
        found.append({name: operations.seen[name] for name in ("clone", "eq", "ne", "any", "all", "cat")})
    assert found[0] == found[1]


def test_a_buffer_written_to_behind_the_models_back_is_put_back():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).eval()
    held = model[1].running_mean
    assert isinstance(held, Tensor)
    with undisturbed(model):
        held.data.fill_(9.0)
    assert held.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(8.0)[::2],
        lambda: torch.arange(9.0).view(3, 3)[:, 0],
        lambda: torch.arange(9.0).view(3, 3).diagonal(),
        lambda: torch.view_as_complex(torch.arange(8.0).view(4, 2)).imag,
        lambda: torch.zeros(2**19)[::2],  # large ones alone
        lambda: torch.zeros(2**18 + 1),
    ],
)
def test_whatever_lies_apart_is_put_back(make: Callable[[], Tensor]):
    t = make()
    expected, before = t.clone(), Snapshot([t])
    before.put_back()
    t.add_(1)
    before.put_back()
    assert torch.equal(t, expected)


def test_a_buffer_that_is_one_number_many_times():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("weights", torch.ones(1).expand(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.weights

    assert lw.ntk(Model(), torch.randn(3, 4)).matrix().shape == (12, 12)


class Decorated(nn.Linear):
    """Whose forward turns autocast's cache on again."""

    forward = torch.autocast("cpu", torch.bfloat16)(nn.Linear.forward)


@pytest.mark.parametrize("layer", [nn.Linear, Decorated])
def test_casts_of_parameters_are_not_left_to_the_users_forward(layer: type[nn.Linear]):
    """Autocast keeps a cast with the graph that made it; whoever finds it in the cache goes by that graph."""
    model, x = layer(3, 2), torch.randn(4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        with undisturbed(model):
            of_library = model(x)
        of_user = model(x)
        assert torch.is_autocast_cache_enabled()
    casts = [{node for node, _ in f.grad_fn.next_functions if node is not None} for f in (of_library, of_user)]
    assert casts[0].isdisjoint(casts[1])
    of_user.sum().backward()
    assert model.weight.grad is not None
